"""How parameters are shared out to the programs of the kernel. It imports nothing, so that a plan may read it."""

ADAMW_BLOCK, NUM_WARPS = 1024, 4
"""Elements of a program, and its warps: two loads of 16 bytes for each thread and tensor, in 54 registers."""
RATES_BLOCK = 128
"""Tensors whose rates one program works out: one for each thread."""
