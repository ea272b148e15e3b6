"""A step of examples/eight_b.py on two GPUs, and of the same model from torch's parts, as others train it.

    torchrun --nproc-per-node 2 -m benchmarks.eight_b_study ours RECORD.json [--steps 5] [--trace TRACE.json.gz]
    torchrun --nproc-per-node 2 -m benchmarks.eight_b_study fp8 | fp8_torchao | peer RECORD.json

`ours` is the unchanged example, `fp8` the same with --fp8, and `fp8_torchao` that with the linear layers of its blocks
converted by torchao. `peer` shares weights, tokens, optimizer, FSDP2 and block-wise compilation. Its blocks
are fully recomputed, cuDNN computes attention, the compiler writes kernels between products, and the loss takes all
logits at once.

The record has seconds per step after one warm-up, losses, memory peaks and the first rank's device. The trace shows a
later step, outside all figures.
"""

import argparse
import importlib
import io
import json
import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from examples import eight_b
from torch import Tensor

from steplab.measurement.machine.environment import read_clocks, read_environment
from steplab.model.checkpointing import wrap_block
from steplab.ops.attention import attention
from steplab.ops.rotary_heads import plain_rotary_heads
from steplab.ops.swiglu import plain_swiglu

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ours", "fp8", "fp8_torchao", "peer"])
    parser.add_argument("record", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    example = load(options.what)
    example.WARM_UP, example.STEPS = 1, options.steps
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_node_local_rank())
    device, is_first = torch.device("cuda"), dist.get_rank() == 0
    profiler = torch.profiler.profile() if options.trace and is_first else None
    seconds, losses = measured(example, device, profiler)
    if is_first:
        environment = read_clocks(read_environment(device), device)
        record = {
            "what": options.what,
            "environment": msgspec.to_builtins(environment),
            "created_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "warm_up_steps": example.WARM_UP,
            "step_s": seconds,
            "losses": losses,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{options.what}: a step takes {median(seconds):.3f} s", flush=True)
    if profiler is not None:
        profiler.export_chrome_trace(str(options.trace))
    dist.destroy_process_group()


def load(what: str) -> Any:
    """The example as a fresh module; `peer` and `fp8_torchao` replace its parts by others'."""
    example: Any = importlib.reload(eight_b)
    if what == "fp8":
        example.BLOCK = example.Fp8Block
    if what == "fp8_torchao":
        example.BLOCK = partial(_by_torchao, example.Block)
    if what == "peer":
        example.Block.forward = _forward_of_torch(example)
        example.wrap_block = lambda *block, **options: wrap_block(*block, **options | {"checkpointing": "full"})
        example.LOSS, example.ATTENTION = "plain", "sdpa_cudnn"
    return example


def measured(
    example: Any, device: torch.device, profiler: torch.profiler.profile | None = None
) -> tuple[list[float], list[float]]:
    """Seconds between barriers of the measured steps, and all losses, with one later step, which the profiler
    records.
    """
    torch.manual_seed(SEED)
    barrier, begun, printed = dist.barrier, list[float](), io.StringIO()

    def noted() -> None:
        barrier()
        begun.append(time.perf_counter())
        if profiler is not None and len(begun) == example.WARM_UP + example.STEPS + 1:
            profiler.start()

    with patch.object(dist, "barrier", noted), redirect_stdout(printed):
        example.main(device)
    if profiler is not None:
        profiler.stop()
    steps = [end - begin for begin, end in pairwise(begun)][example.WARM_UP :]
    return steps, [float(loss) for loss in re.findall(r"loss (\S+)", printed.getvalue())]


def _forward_of_torch(example: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def forward(block: Any, x_BTC: Tensor, rotary_2TD: Tensor) -> Tensor:
        qkv_BHTD = plain_rotary_heads(block.qkv(block.norm_1(x_BTC)), rotary_2TD, example.HEADS)
        o_BHTD = attention(*qkv_BHTD, causal=True, implementation=example.ATTENTION)
        x_BTC = x_BTC + block.out(o_BHTD.transpose(1, 2).flatten(2))
        return x_BTC + block.down(plain_swiglu(block.gate_up(block.norm_2(x_BTC))))

    return forward


def _by_torchao(block: Callable[[], Any]) -> Any:
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

    return convert_to_float8_training(block())


if __name__ == "__main__":
    main()
