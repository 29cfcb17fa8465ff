"""Tree speculative decoding for Mamba and hybrid Mamba-attention language models."""
