"""The kernels between the products of a block (steplab/ops/rms_norm, rotary_heads and swiglu): time and bytes a second.

    python -m benchmarks.block_ops [--models xl large 2.7b] [--seconds 60] [--output FILE.json] [--tiles]

Each call is timed as one of many in a CUDA graph, over so many sets of tensors that the L2 cache holds none of a set
when its turn comes again; in a step part of them is there still. Given is the median of seven replays. Bytes are each
input read once and each output written once. Batch 4 and context 512, bf16 products and a float32 residual stream.
--tiles: other tiles and warps beside those in use.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from steplab.ops import rms_norm as norm
from steplab.ops import rotary_heads as heads
from steplab.ops import swiglu as gated
from steplab.specs.model import MODEL_SIZES, TransformerShape

BATCH, CONTEXT = 4, 512
TOKENS = BATCH * CONTEXT
BF16, FP32 = torch.bfloat16, torch.float32
CACHE_BYTES, MOST_SETS, REPLAYS = 150_000_000, 24, 7
Make = Callable[[], Callable[[], object]]
"""Makes a set of tensors, and gives the call on them."""

TILES: dict[str, list[tuple[Any, dict[str, int]]]] = {
    "swiglu": [
        (gated, {"ROWS": rows, "COLUMNS": columns, "NUM_WARPS": warps})
        for rows, columns, warps in [(2, 512, 4), (4, 256, 4), (1, 1024, 4), (2, 1024, 4), (4, 512, 4)]
    ],
    "rotary_heads": [
        (heads, {"ELEMENTS": elements, "NUM_WARPS": warps})
        for elements, warps in [(1024, 4), (512, 2), (2048, 8), (2048, 4)]
    ],
    "add_rms_norm": [(norm, {"FORWARD_WARPS": warps}) for warps in (8, 4, 2)],
    "add_rms_norm backward": [
        (norm, {"NUM_PROGRAMS": 132 * programs, "BACKWARD_WARPS": warps})
        for programs, warps in [(4, 8), (4, 4), (8, 4), (8, 8), (2, 16), (2, 8), (3, 8), (4, 16)]
    ],
}
"""By operator: the module, and the constants of it. The first are those in use."""


def operators(shape: TransformerShape) -> Iterator[tuple[str, int, Make]]:
    """Name, bytes and calls of each operator at a model's sizes."""
    width, inner, num_heads, head_dim = shape.d_model, shape.d_ff, shape.num_heads, shape.head_dim
    table = torch.randn(2, CONTEXT, head_dim // 2, device="cuda")
    ops = torch.ops.steplab

    def made(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*sizes, dtype=dtype, device="cuda")

    def swiglu() -> Callable[[], object]:
        joined = made(TOKENS, 2 * inner)
        return lambda: ops.swiglu(joined)

    def swiglu_backward() -> Callable[[], object]:
        joined, grad = made(TOKENS, 2 * inner), made(TOKENS, inner)
        return lambda: ops.swiglu_backward(grad, joined)

    def rotary() -> Callable[[], object]:
        merged = made(BATCH, CONTEXT, 3 * width)
        return lambda: ops.rotary_heads(merged, table, num_heads)

    def rotary_backward() -> Callable[[], object]:
        grads = [made(BATCH, CONTEXT, num_heads, head_dim) for _ in range(3)]
        return lambda: ops.rotary_heads_backward(*grads, table)

    def add_norm() -> Callable[[], object]:
        x, branch, weight = made(TOKENS, width, dtype=FP32), made(TOKENS, width), made(width, dtype=FP32)
        return lambda: ops.add_rms_norm(x, branch, weight, 1e-5, BF16)

    def add_norm_backward() -> Callable[[], object]:
        grad, weight, rstd = made(TOKENS, width), made(width, dtype=FP32), made(TOKENS, dtype=FP32)
        of_sum, total = made(TOKENS, width, dtype=FP32), made(TOKENS, width, dtype=FP32)
        return lambda: ops.add_rms_norm_backward(grad, of_sum, total, weight, rstd, FP32, BF16)

    yield "add_rms_norm backward", (2 + 4 + 4 + 4 + 2) * TOKENS * width, add_norm_backward
    yield "add_rms_norm", (4 + 2 + 2 + 4) * TOKENS * width, add_norm
    yield "rotary_heads backward", 2 * 6 * TOKENS * width, rotary_backward
    yield "rotary_heads", 2 * 6 * TOKENS * width, rotary
    yield "swiglu backward", 2 * 5 * TOKENS * inner, swiglu_backward
    yield "swiglu", 2 * 3 * TOKENS * inner, swiglu


def timed_us(make: Make, num_bytes: int) -> list[float]:
    """Microseconds of a call, by replay."""
    calls = [make() for _ in range(min(max(2, CACHE_BYTES // num_bytes + 1), MOST_SETS))]
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * 4:
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / (4 * len(calls)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["xl", "large", "2.7b"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    end, rows = time.monotonic() + options.seconds, list[dict[str, Any]]()
    print("| model | operator | constants | time | bytes moved | bandwidth |\n| --- | --- | --- | ---: | ---: | ---: |")
    for model in options.models:
        for name, num_bytes, make in operators(MODEL_SIZES[model]):
            tiles = TILES.get(name) or TILES[name.removesuffix(" backward")]
            for module, constants in tiles if options.tiles else tiles[:1]:
                if time.monotonic() > end:
                    return
                for constant, value in constants.items():
                    setattr(module, constant, value)
                samples = timed_us(make, num_bytes)
                us = median(samples)
                words = " ".join(f"{constant.lower()} {value}" for constant, value in constants.items())
                print(
                    f"| {model} | {name} | {words} | {us:.1f} µs | {num_bytes / 1e6:.1f} MB "
                    f"| {num_bytes / us / 1e6:.2f} TB/s |",
                    flush=True,
                )
                rows.append(
                    {"model": model, "operator": name, "constants": constants, "bytes": num_bytes, "us": samples}
                )
                if options.output:
                    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
                    options.output.write_text(json.dumps(head | {"rows": rows}, indent=1), encoding="utf-8")
            for module, constants in tiles[:1]:
                for constant, value in constants.items():
                    setattr(module, constant, value)


if __name__ == "__main__":
    main()
