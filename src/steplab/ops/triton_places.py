"""Devices and block sizes of Triton's kernels, and the table of loss implementations.

It does not import torch, so that plans can read it. Kernels run on CUDA, and on a CPU under Triton's interpreter, which
is slow and for tests.
"""

import os
from dataclasses import dataclass

ADAMW_BLOCK, ADAMW_WARPS = 512, 4
"""Elements of a program of AdamW's kernel, and its warps. Each thread loads 16 bytes of each float32 tensor, in 38
registers.

With 1,024 elements and masters a thread would take 128 registers. An update during a backward pass would then take
longer, though not one that runs alone.
"""
RATES_BLOCK = 128
"""Tensors per program of adamw_rates_kernel: one per thread."""
NUM_PROGRAMS = 528
"""Programs of RMSNorm's backward kernel, four on each multiprocessor of an H200.

It is the same on every GPU, because it decides the order of sums of the weight's gradient.
"""

FP8_MULTIPLE = 16
"""Tokens, inputs and outputs of an fp8 linear layer must be multiples of this, because operands are read 16 bytes at a
time.
"""


def runs_on(device_type: str) -> bool:
    return device_type == "cuda" or (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`: the sizes that Triton's blocks can have."""
    return 1 << max(number - 1, 0).bit_length()


CHUNK_BYTES = 2**29
"""Most bytes of logits in memory at a time. At a vocabulary of 131,072 in bf16 that is 2,048 tokens: a multiple of
cuBLAS's tile sizes, and enough for products as fast as the whole batch's.
"""
ROW_MULTIPLE = 64
"""Rows of logits are padded to a multiple of this many elements, so that each begins at a multiple of 16 bytes."""
ALIGNED = 8
"""A vocabulary that is no multiple of this (16 bytes of bf16) has a separate product for its last entries:
`whole_entries`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    name: str
    summary: str
    in_chunks: bool = True
    """True if it holds the logits of a chunk of tokens at a time, and forms the gradients in the forward pass."""
    in_kernel: bool = False
    """True if softmax, loss and gradient of a chunk are one kernel without temporary tensors."""


TABLE = (
    Implementation(name="plain", summary="torch's linear layer, then its cross_entropy", in_chunks=False),
    Implementation(
        name="chunked", summary="both for a chunk of tokens at a time, gradients formed in the forward pass, in PyTorch"
    ),
    Implementation(
        name="fused", summary="the same with softmax, loss and gradient in one Triton kernel", in_kernel=True
    ),
)

NAMES = tuple(row.name for row in TABLE)
"""The choices of --loss."""
_BY_NAME = {row.name: row for row in TABLE}


def implementation(name: str) -> Implementation:
    return _BY_NAME[name]


def padded_entries(num_entries: int) -> int:
    return -(-num_entries // ROW_MULTIPLE) * ROW_MULTIPLE


def whole_entries(num_entries: int) -> int:
    """Number of vocabulary entries in the first product with the hidden states; a second product has the rest.

    On an H200 cuBLAS took four times as long for a vocabulary of 50,257, no multiple of 8, even with rows at multiples
    of 128 bytes. So it is cut at a multiple of ROW_MULTIPLE. The rest of the weight is copied and padded with zeros:
    ROW_MULTIPLE rows instead of a full copy.
    """
    return num_entries if num_entries % ALIGNED == 0 else num_entries // ROW_MULTIPLE * ROW_MULTIPLE


def chunk_tokens(num_tokens: int, num_entries: int, item_bytes: int) -> int:
    """Number of tokens in a chunk: all, or the largest power of two with logits of at most CHUNK_BYTES."""
    most = max(CHUNK_BYTES // (padded_entries(num_entries) * item_bytes), 1)
    return num_tokens if num_tokens <= most else 1 << (most.bit_length() - 1)
