"""Where Triton's kernels run, and how their programs share out the work. It imports nothing of torch, so that it can be
asked before there is a step.

They run on CUDA, and on a CPU under Triton's interpreter, which is slow and for tests.
"""

import os

ADAMW_BLOCK, ADAMW_WARPS = 512, 4
"""Elements of a program of AdamW's kernel, and its warps: one load of 16 bytes for each thread and float32 tensor, in
38 registers. One of 1,024 with masters takes 128, and an update beside a backward pass is then longer, by itself it is
not."""
RATES_BLOCK = 128
"""Tensors whose rates one program works out: one for each thread."""
NUM_PROGRAMS = 528
"""Programs of RMSNorm's backward kernel, four on each multiprocessor of an H200. It is the same on every GPU, since it
decides in which order the weight's gradient is added up."""

FP8_MULTIPLE = 16
"""Tokens, inputs and outputs of a linear layer in fp8 are multiples of this: operands are read by 16 bytes."""


def runs_on(device_type: str) -> bool:
    """Whether Triton's kernels run on such a device."""
    return device_type == "cuda" or (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
