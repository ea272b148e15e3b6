"""A step of AdamW: one kernel, over float32 parameters and over bfloat16 weights with float32 masters, beside torch's
optimizers over float32 parameters, in turns in one process.

    python -m benchmarks.adamw_study [--parameters 1e9] [--tensors 1] [--repeats 20] [--output FILE.json] [--blocks]

An update reads parameter, gradient and both moments and writes all but the gradient: 28 bytes a parameter. With masters
the gradient has 2 bytes for 4, and 2 are written for the weight: 28 again. A copy of as many bytes is timed in the same
turns, as what the device's memory does at best. Times are from CUDA events; the median is given, with the smallest and
the largest. --blocks: the kernel in several sizes of blocks.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steplab.ops import triton_places as sharing
from steplab.ops.adamw import OneKernelAdamW

BYTES_A_PARAMETER = 28
BLOCKS = [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16)]
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


def timed_ms(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)  # about 2 ms, in which Python gets ahead of the device
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def parameters_of(count: int, num_tensors: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters of equal sizes, with gradients."""
    size = count // num_tensors
    made = [torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for _ in range(num_tensors)]
    for parameter in made:
        parameter.grad = torch.randn(size, device="cuda", dtype=dtype)
    return made


def with_masters(count: int, num_tensors: int) -> OneKernelAdamW:
    weights = parameters_of(count, num_tensors, torch.bfloat16)
    return OneKernelAdamW(weights, masters={weight: weight.detach().float() for weight in weights}, **OPTIONS)


def with_block(made: OneKernelAdamW, block: int, warps: int) -> Callable[[], None]:
    def run() -> None:
        sharing.ADAMW_BLOCK, sharing.ADAMW_WARPS = block, warps
        made.step()

    return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    count = int(options.parameters)
    ours = OneKernelAdamW(parameters_of(count, options.tensors), **OPTIONS)
    runs: dict[str, Callable[[], object]] = {}
    if options.blocks:
        for made, what in ((ours, ""), (with_masters(count, options.tensors), ", with masters")):
            for block, warps in BLOCKS:
                # Tables are of a size of blocks, so each has an optimizer of its own, over the same tensors.
                kept = {weight: state["master"] for weight, state in made.state.items() if "master" in state}
                own = OneKernelAdamW(made.param_groups[0]["params"], masters=kept, **OPTIONS)
                own.state = made.state
                runs[f"one kernel, blocks of {block}, {warps} warps{what}"] = with_block(own, block, warps)
    else:
        runs["one kernel"] = ours.step
        runs["one kernel, bfloat16 weights with masters"] = with_masters(count, options.tensors).step
        for name in ("fused", "foreach"):
            theirs = torch.optim.AdamW(ours.param_groups[0]["params"], **{**OPTIONS, name: True})
            runs[f"torch {name}"] = theirs.step
    # Half of the bytes are read and half written; the memory is the optimizer's own size at most.
    source = torch.empty(count * BYTES_A_PARAMETER // 2 // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    runs["copy of as many bytes"] = lambda: target.copy_(source)
    for run in runs.values():
        for _ in range(2):
            run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            samples[name].append(timed_ms(run))
    return {
        "parameters": count,
        "tensors": options.tensors,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bytes": BYTES_A_PARAMETER * count,
        "samples_ms": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--blocks", action="store_true", help="the kernel alone, in several sizes of blocks")
    parser.add_argument("--output", default="", help="a file for the samples, in JSON")
    options = parser.parse_args()
    result = measure(options)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    print(
        f"{result['parameters']:,} parameters in {result['tensors']} tensors, {result['device']}, torch "
        f"{result['torch']}; median of turns"
    )
    print("| update | ms | smallest to largest | TB/s |\n|---|--:|--:|--:|")
    for name, found in sorted(result["samples_ms"].items(), key=lambda item: statistics.median(item[1])):
        middle = statistics.median(found)
        print(
            f"| {name} | {middle:.3f} | {min(found):.3f} to {max(found):.3f} | {result['bytes'] / middle / 1e9:.2f} |"
        )


if __name__ == "__main__":
    main()
