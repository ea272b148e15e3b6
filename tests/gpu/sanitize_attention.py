"""A few calls of flash_triton, forward and backward, for NVIDIA's compute-sanitizer to watch:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize_attention.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize_attention.py

The shapes are small, as everything is many times slower there; each has a part of a tile, and most have several tiles.
Exits with 1 where a result is not finite. For memcheck, PYTORCH_NO_CUDA_MEMORY_CACHING=1 in the environment lets it see
where each tensor ends.
"""

import sys
from unittest.mock import patch

import torch

from steplab.ops.attention import triton_tuning
from steplab.ops.attention.functions import FlashAttentionTriton

# Heads, heads of keys, queries, keys, head dimension, type, causal.
SHAPES = [
    (2, 1, 200, 330, 64, torch.bfloat16, True),
    (1, 1, 330, 200, 80, torch.bfloat16, False),
    (2, 2, 130, 130, 128, torch.float16, True),
    (1, 1, 70, 150, 33, torch.float16, False),
    (1, 1, 140, 140, 200, torch.bfloat16, True),
    (1, 1, 1, 140, 96, torch.bfloat16, False),
    (2, 1, 70, 40, 64, torch.float32, True),
]


def run_all() -> bool:
    """Whether all results are finite."""
    good = True
    for heads, key_heads, num_queries, num_keys, dim, dtype, causal in SHAPES:
        sizes = ((heads, num_queries), (key_heads, num_keys), (key_heads, num_keys))
        q, k, v = (torch.randn(1, *size, dim, device="cuda", dtype=dtype).requires_grad_() for size in sizes)
        out = FlashAttentionTriton.apply(q, k, v, causal)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        good &= all(bool(x.isfinite().all()) for x in (out, *gradients))
    torch.cuda.synchronize()
    return good


def variants_here() -> list[bool]:
    """Whether the Hopper kernels are to run: no, and yes where they can."""
    hopper = torch.cuda.get_device_capability() == (9, 0) and triton_tuning.hopper_kernels_run()
    return [False, True] if hopper else [False]


def main() -> int:
    """The exit status."""
    torch.manual_seed(1)
    good = True
    for hopper in variants_here():
        with patch.object(triton_tuning, "hopper_kernels_run", return_value=hopper):
            triton_tuning._found.cache_clear()
            good &= run_all()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
