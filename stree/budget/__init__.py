"""The number of nodes of each step: fixed, or chosen by goodput (SmartSpec, arXiv 2406.14066)."""
