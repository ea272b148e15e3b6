"""The optimizer step, sharded in several ways and not, on parameters of the xl model's shapes: time and memory.

    torchrun --nproc-per-node N -m benchmarks.sharded_optimizer [--layers 48] [--width 1600] [--repeats 20]

All ways come one after the other in one process group. A time is the median over repeats of the slowest rank's, from a
barrier until the device is done with the update and the exchange. Nothing else runs meanwhile, so this does not say
what `overlap_with` hides under the next forward pass.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steplab.parallel import ShardedOptimizer

ADAMW: dict[str, Any] = {"lr": 1e-4, "fused": True}


def layers(width: int, depth: int, device: torch.device) -> nn.ModuleList:
    """Embedding, blocks and head, with the parameters of each and nothing that computes."""
    block: list[tuple[int, ...]] = [(width,), *[(width, width)] * 4, (width,), *[(4 * width, width)] * 3]
    shapes: list[list[tuple[int, ...]]] = [[(10_000, width)], *[block] * depth, [(width,), (10_000, width)]]
    return nn.ModuleList(nn.ParameterList(torch.zeros(shape, device=device) for shape in layer) for layer in shapes)


def slowest_s(seconds: float, device: torch.device) -> float:
    longest = torch.tensor(seconds, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def timed_s(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    samples = []
    for repeat in range(repeats + 3):
        dist.barrier()
        settle(device)
        start = time.perf_counter()
        action()
        settle(device)
        if repeat >= 3:
            samples.append(slowest_s(time.perf_counter() - start, device))
    return median(samples)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, options: argparse.Namespace, device: torch.device, **choices: Any) -> str:
    """One row: without choices, of the unsharded optimizer."""
    model = layers(options.width, options.layers, device)
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        ShardedOptimizer(params, torch.optim.AdamW, **choices, **ADAMW)
        if choices
        else torch.optim.AdamW(params, **ADAMW)
    )
    for param in params:
        param.grad = torch.zeros_like(param)
    step_s = timed_s(optimizer.step, device, options.repeats)
    local_s, padding_bytes = step_s, 0
    if isinstance(optimizer, ShardedOptimizer):
        local_s = timed_s(optimizer._local.step, device, options.repeats)  # type: ignore[union-attr]
        padding_bytes = optimizer.padding_bytes
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    state_bytes = slowest_s(sum(tensor.nbytes for tensor in state), device)
    return (
        f"| {name} | {step_s * 1e3:.2f} | {local_s * 1e3:.2f} | {state_bytes / 1e9:.3f} | {padding_bytes / 1e6:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    rows = [measure("unsharded", options, device)]
    for exchange in ("all_gather", "broadcast"):
        for bucket_size_mb in (float("inf"), 1000.0, 400.0, 100.0):
            name = f"{exchange}, {bucket_size_mb:g} MB"
            rows.append(measure(name, options, device, exchange=exchange, bucket_size_mb=bucket_size_mb))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {device.type}, torch {torch.__version__}\n")
        print("| exchange, bucket | step ms | of it, the update | state GB, largest rank | padding MB |")
        print("|---|---|---|---|---|", *rows, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
