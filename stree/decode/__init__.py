"""The decode loop, one decode step, its capture as a CUDA graph, and the checks and measurements around them."""
