"""A few calls of flash_triton, forward and backward, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize_attention.py portable
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize_attention.py portable

Other arguments: `hopper`; `few`, fewer and smaller shapes for the slow racecheck; `handover`, an empty kernel of the
same kind, which shows racecheck's findings about Triton's handover between warp groups. Shapes are small but have
partial and several tiles. Exit code 1: a result is not finite. PYTORCH_NO_CUDA_MEMORY_CACHING=1 shows memcheck each
tensor's end.
"""

import os
import sys
import time
from unittest.mock import patch

import torch

from steplab.ops.attention import triton_backward, triton_forward, triton_tuning
from steplab.ops.attention.functions import FlashAttentionTriton

# Heads, heads of keys, queries, keys, head dimension, type, causal.
SHAPES = [
    (2, 1, 200, 330, 64, torch.bfloat16, True),
    (1, 1, 330, 200, 80, torch.bfloat16, False),
    (2, 2, 130, 130, 128, torch.float16, True),
    (1, 1, 70, 150, 33, torch.float16, False),
    (1, 1, 140, 140, 200, torch.bfloat16, True),
    (1, 1, 1, 140, 96, torch.bfloat16, False),
    (3, 1, 150, 140, 80, torch.bfloat16, True),
    (2, 1, 70, 40, 64, torch.float32, True),
]
# Every kernel for Hopper, more tiles than it has slots for, keys that heads share, in pairs that hand sums on, and one
# and two products a sum.
# Beyond 2,048 positions forward has a third consumer.
FEW = [
    (1, 1, 300, 300, 64, torch.bfloat16, True),
    (1, 1, 200, 300, 80, torch.bfloat16, False),
    (1, 1, 200, 300, 128, torch.float16, True),
    (1, 1, 2100, 70, 64, torch.bfloat16, False),
    (1, 1, 130, 200, 256, torch.bfloat16, False),
    (4, 1, 130, 150, 64, torch.bfloat16, True),
]
MULTIPROCESSORS = 2
"""Assumed number of multiprocessors, so that forward programs have several tasks."""


def run_all(shapes: list[tuple[int, int, int, int, int, torch.dtype, bool]]) -> bool:
    good = True
    for heads, key_heads, num_queries, num_keys, dim, dtype, causal in shapes:
        begin = time.perf_counter()
        sizes = ((heads, num_queries), (key_heads, num_keys), (key_heads, num_keys))
        q, k, v = (torch.randn(1, *size, dim, device="cuda", dtype=dtype).requires_grad_() for size in sizes)
        out = FlashAttentionTriton.apply(q, k, v, causal)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out)) if dim < 256 else ()
        good &= all(bool(x.isfinite().all()) for x in (out, *gradients))
        print(f"{num_queries} queries of {dim}, {num_keys} keys: {time.perf_counter() - begin:.1f} s", flush=True)
    torch.cuda.synchronize()
    return good


def hand_over() -> bool:
    from tests.gpu.handover import handover_kernel

    x = torch.zeros(3, device="cuda", dtype=torch.int32)
    handover_kernel[(4,)](x, 7, num_warps=4)
    return x.tolist() == [7, 7, 7]


def in_pairs(bytes_a_head: int, sharing: int, *of_programs: int) -> int:
    return 2 - sharing % 2


def main() -> int:
    torch.manual_seed(1)
    if sys.argv[1] == "handover":
        return 0 if hand_over() else 1
    with (
        patch.object(triton_tuning, "hopper_kernels_run", return_value=sys.argv[1] in ("hopper", "few")),
        patch.object(triton_backward, "heads_in_a_row", in_pairs),
    ):
        if sys.argv[1] != "few":
            return 0 if run_all(SHAPES) else 1
        with patch.object(triton_forward, "num_multiprocessors", return_value=MULTIPROCESSORS):
            return 0 if run_all(FEW) else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Triton's compiler threads may abort an orderly exit
