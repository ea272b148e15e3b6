"""The last linear layer with the cross-entropy, forward and backward: steplab's and others', in turns in one process.

    python -m benchmarks.cross_entropy_study [--tokens 8192] [--width 4096] [--entries 131072] [--dtype bf16]
        [--repeats 12] [--only fused,liger] [--output FILE.json]
    python -m benchmarks.cross_entropy_study --kernel      # softmax, loss and gradient alone, in several tile sizes

Hidden states, weight and targets are random. A time is from CUDA events around forward and backward, gradients freed
between turns, whose order is drawn anew each time, and the L2 cache overwritten before each; the median over repeats is
given, with the smallest and the largest. Memory is the peak of torch's allocator beyond the inputs and the gradients of
both. Errors are those of a smaller batch against float64: the largest, over the largest exact gradient.

liger-kernel and cut-cross-entropy are measured where they are installed.
"""

import argparse
import gc
import importlib.metadata
import json
import random
import statistics
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steplab.ops.cross_entropy import linear_cross_entropy

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, targets) -> the mean loss"""


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets)


def own(name: str) -> Loss:
    return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, implementation=name)


def liger(**options: Any) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    parameters = list(signature(Function.forward).parameters.values())[4:]  # after ctx, input, weight and target
    others = [options.get(each.name, each.default) for each in parameters]

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        output = Function.apply(hidden, weight, targets, *others)
        return output[0] if isinstance(output, tuple) else output

    return loss


def cut(filter_eps: Any) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return lambda hidden, weight, targets: cut_cross_entropy(hidden, weight, targets, filter_eps=filter_eps)


def torchs() -> Loss:
    in_torch, options = functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()  # from torch 2.13 on
    return lambda hidden, weight, targets: in_torch(hidden, weight, targets, options=options)


CANDIDATES: dict[str, Callable[[], Loss]] = {
    "fused": lambda: own("fused"),
    "chunked": lambda: own("chunked"),
    "torch eager": lambda: plain,
    "torch compiled": lambda: torch.compile(plain, dynamic=False),
    "torch linear_cross_entropy": torchs,
    "liger": liger,
    "liger fp32 sums": lambda: liger(accum_dtype=torch.float32),
    "cut_cross_entropy exact": lambda: cut(None),
    "cut_cross_entropy": lambda: cut("auto"),
}
"""By name: gives the function, or raises where it is not there. Liger's own chunks are as it chooses them; cut cross-
entropy's default leaves out small gradients, and exact has all."""


class Inputs:
    """Random hidden states, weight and targets, which every candidate gets."""

    def __init__(self, tokens: int, width: int, entries: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_()
        self.weight = torch.randn(entries, width, device=DEVICE, dtype=dtype).mul_(width**-0.5).requires_grad_()
        self.targets = torch.randint(entries, (tokens,), device=DEVICE)

    @property
    def gradients_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes

    def step(self, loss: Loss) -> None:
        loss(self.hidden, self.weight, self.targets).backward()

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None


def peak_beyond_bytes(inputs: Inputs, loss: Loss) -> int:
    """Peak memory of a step, beyond the inputs and the gradients."""
    inputs.forget()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    inputs.step(loss)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    inputs.forget()
    return peak - before - inputs.gradients_bytes


def timed_ms(run: Callable[[], None], flush: Tensor) -> float:
    flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # about 1 ms, in which Python gets ahead of the device
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def errors_of(loss: Loss, dtype: torch.dtype) -> dict[str, float]:
    """Largest error of the gradients, over the largest exact one, on 2048 tokens of width 512 and 16,384 entries."""
    small = Inputs(2048, 512, 16_384, dtype)
    small.step(loss)
    hidden, weight = (x.detach().double().requires_grad_() for x in (small.hidden, small.weight))
    plain(hidden, weight, small.targets).backward()
    found = {}
    for name, got, exact in (("hidden", small.hidden.grad, hidden.grad), ("weight", small.weight.grad, weight.grad)):
        assert got is not None
        assert exact is not None
        found[name] = ((got.double() - exact).abs().max() / exact.abs().max()).item()
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dtype = DTYPES[options.dtype]
    inputs = Inputs(options.tokens, options.width, options.entries, dtype)
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    rows: dict[str, dict[str, Any]] = {}
    losses: dict[str, Loss] = {}
    for name in options.only.split(",") if options.only else CANDIDATES:
        try:
            loss = CANDIDATES[name]()
            for _ in range(3):
                inputs.step(loss)
                inputs.forget()
            rows[name] = {"beyond_bytes": peak_beyond_bytes(inputs, loss), "errors": errors_of(loss, dtype)}
            losses[name] = loss
        except Exception as error:
            torch.cuda.synchronize()
            rows[name] = {"left_out": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
        inputs.forget()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"ready: {name} {rows[name].get('left_out', '')}", file=sys.stderr)
    samples: dict[str, list[float]] = {name: [] for name in losses}
    order, shuffled = list(losses), random.Random(0)
    for _ in range(options.repeats):
        shuffled.shuffle(order)  # at the limit of power a candidate's clock depends on who ran before it
        for name in order:
            samples[name].append(timed_ms(lambda loss=losses[name]: inputs.step(loss), flush))  # type: ignore[misc]
            inputs.forget()
    for name, found in samples.items():
        rows[name] |= {"samples_ms": found, "median_ms": statistics.median(found)}
    flops = 6 * options.tokens * options.width * options.entries
    return {
        "tokens": options.tokens,
        "width": options.width,
        "entries": options.entries,
        "dtype": options.dtype,
        "flops": flops,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "packages": {name: version_of(name) for name in ("triton", "liger-kernel", "cut-cross-entropy")},
        "rows": rows,
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['tokens']} tokens, width {result['width']}, {result['entries']} entries, {result['dtype']}, "
        f"{result['device']}, torch {result['torch']}; forward + backward, median of turns",
        "| implementation | ms | smallest to largest | TFLOP/s of three products | beyond, MiB | error of d hidden "
        "| of d weight |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    measured = {name: row for name, row in result["rows"].items() if "median_ms" in row}
    for name, row in sorted(measured.items(), key=lambda item: item[1]["median_ms"]):
        samples, errors = row["samples_ms"], row["errors"]
        lines.append(
            f"| {name} | {row['median_ms']:.2f} | {min(samples):.2f} to {max(samples):.2f} "
            f"| {result['flops'] / row['median_ms'] / 1e9:.0f} | {row['beyond_bytes'] / 2**20:.0f} "
            f"| {errors['hidden']:.1e} | {errors['weight']:.1e} |"
        )
    lines += [f"left out: {name}: {row['left_out']}" for name, row in result["rows"].items() if "left_out" in row]
    return "\n".join(lines)


def measure_kernel(options: argparse.Namespace) -> dict[str, Any]:
    """The kernel on the logits of a chunk, which it reads twice and writes once, in several sizes of blocks."""
    from steplab.ops import cross_entropy_chunks as chunks
    from steplab.ops.cross_entropy_chunks import Terms
    from steplab.ops.cross_entropy_table import chunk_tokens, padded_entries

    dtype, entries = DTYPES[options.dtype], options.entries
    tokens = chunk_tokens(options.tokens, entries, dtype.itemsize)
    logits = torch.randn(tokens, padded_entries(entries), device=DEVICE).to(dtype)[:, :entries]
    targets = torch.randint(entries, (tokens,), device=DEVICE)
    losses, scale = torch.empty(tokens, device=DEVICE), torch.ones(tokens, device=DEVICE)
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    rows = []
    for block, warps in [(2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32)]:
        chunks.BLOCK, chunks.NUM_WARPS = block, warps

        def run() -> None:
            chunks.triton_rows(logits, targets, losses, scale, Terms(-100, 0.0, 0.0))

        for _ in range(3):
            run()
        took_ms = statistics.median(timed_ms(run, flush) for _ in range(options.repeats))
        moved_bytes = 2 * tokens * entries * dtype.itemsize
        rows.append(
            {"block": block, "warps": warps, "ms": took_ms, "read_once_written_once_per_s": moved_bytes / took_ms * 1e3}
        )
    return {"tokens": tokens, "entries": entries, "dtype": options.dtype, "kernel": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("width", 4096), ("entries", 131_072), ("repeats", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--only", default="", help=f"of {', '.join(CANDIDATES)}, with commas")
    parser.add_argument("--kernel", action="store_true", help="the kernel alone")
    parser.add_argument("--output", default="", help="a file for the samples, in JSON")
    options = parser.parse_args()
    result = measure_kernel(options) if options.kernel else measure(options)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if options.kernel:
        for row in result["kernel"]:
            rate = f"{row['read_once_written_once_per_s'] / 1e12:.2f} TB/s, each logit read once and written once"
            print(f"block {row['block']:6d}  {row['warps']:2d} warps  {row['ms']:.3f} ms  {rate}")
    else:
        print(table(result))


if __name__ == "__main__":
    main()
