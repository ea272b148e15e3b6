"""How parameters are shared out to the programs of the kernel. It imports nothing, so that a plan may read it."""

ADAMW_BLOCK, NUM_WARPS = 512, 4
"""Elements of a program, and its warps: one load of 16 bytes for each thread and float32 tensor, in 38 registers. One
of 1,024 with masters takes 128, and an update beside a backward pass is then longer, by itself it is not."""
RATES_BLOCK = 128
"""Tensors whose rates one program works out: one for each thread."""
