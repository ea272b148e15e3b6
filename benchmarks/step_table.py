"""The committed table of the step study, from its records: python -m benchmarks.step_table RECORDS.jsonl.gz > table.md

Every figure is computed from the raw samples in the records; nothing is typed in.
"""

import gzip
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import mean, median

from steplab.records.codec import decode
from steplab.records.run import Run
from steplab.units import GIB

SIZES = ("small", "medium", "large", "xl", "2.7b")
Key = tuple[str, int, str]

HEAD = """# The training step on one {env.device.name}

torch {env.torch}, Triton {env.triton}, cuDNN {env.cudnn}, driver {env.driver}, batch 4, vocabulary 10,000,
fused AdamW, fp32 weights, autocast for bf16, 5 warm-up steps, 10 measured; medians of back-to-back steps by CUDA
events. Made by `python -m benchmarks.step_study STORE` (one worker a GPU of one machine, each cell alone on its
GPU), written by `python -m benchmarks.step_table`; raw samples in tests/golden/{records}.
"""


def main(records: str) -> None:
    runs = [
        run for line in gzip.decompress(Path(records).read_bytes()).splitlines() if isinstance(run := decode(line), Run)
    ]
    env = next(run.environment for run in runs if run.environment)
    print(HEAD.format(env=env, records=Path(records).name))
    for title, name, attention in (
        ("Eager, scores materialised", "sizes", "plain"),
        ("Compiled, scores materialised", "compiled", "plain"),
    ):
        print(f"## {title}\n")
        _grid([run for run in runs if run.name == name and run.spec and run.spec.attention == attention])
    print("## Beside transformers, compiled, bf16, context 512, both with torch's scaled_dot_product_attention\n")
    _peers([run for run in runs if run.spec and run.spec.attention == "sdpa"])
    print("## 0, 1, 2 and 5 warm-up steps: mean of the ten steps that follow, milliseconds\n")
    _warmup([run for run in runs if run.name == "warmup"])
    print("## A cell that does not fit\n")
    for run in runs:
        if run.failure and run.spec:
            asked = (run.failure.requested_bytes or 0) / GIB
            before = (run.failure.peak_allocated_bytes or 0) / GIB
            print(f"{run.spec.model.label}, context {run.spec.context}, {run.spec.precision}, train: out of memory in")
            print(f"{run.failure.phase}, asked for {asked:.2f} GiB with at most {before:.1f} GiB in tensors before.")
            print("The sweep went on to its next cell.")


def _grid(runs: Iterable[Run]) -> None:
    cells: dict[Key, dict[str, Run]] = defaultdict(dict)
    for run in runs:
        assert run.spec
        cells[(run.spec.model.label, run.spec.context, run.spec.precision)][run.spec.pass_name] = run
    print("| model | context | precision | forward ms | forward + backward ms | train ms | MFU (causal) | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for key in sorted(cells, key=lambda key: (SIZES.index(key[0]), key[1], key[2] != "fp32")):
        passes = cells[key]
        train = passes.get("train")
        mfu = train.utilization("mfu", "causal") if train else None
        peak = train.memory.peak("step") if train and train.memory else None
        times = " | ".join(_milliseconds(passes.get(name)) for name in ("forward", "forward_backward", "train"))
        peak_gib = _gib(peak.peak_allocated_bytes if peak else None)
        shares = f"{100 * mfu.value:.1f} %" if mfu and mfu.value else "–"
        print(f"| {key[0]} | {key[1]} | {key[2]} | {times} | {shares} | {peak_gib} |")
    print()


def _peers(runs: Iterable[Run]) -> None:
    steps: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for run in runs:
        assert run.spec
        size = "small" if "small" in run.spec.model.name else "2.7b"
        steps[(size, "transformers" if run.spec.model.kind == "hf" else "steplab")].append(_step(run))
    print("| model | steplab ms | transformers ms | steplab / transformers | processes: steplab; transformers |")
    print("|---|---|---|---|---|")
    for size in ("small", "2.7b"):
        both = [steps[(size, who)] for who in ("steplab", "transformers")]
        ours, theirs = (median(chain.from_iterable(processes)) for processes in both)
        each = "; ".join(", ".join(f"{median(p) * 1e3:.2f}" for p in processes) for processes in both)
        print(f"| {size} | {ours * 1e3:.2f} | {theirs * 1e3:.2f} | {ours / theirs:.3f} | {each} |")
    print("\nAll processes of a row on one GPU, one after the other; the median of all samples.\n")


def _warmup(runs: Iterable[Run]) -> None:
    means: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        assert run.spec
        means[run.spec.model.label][run.spec.warmup] = mean(_step(run))
    print("| model | 0 | 1 | 2 | 5 |")
    print("|---|---|---|---|---|")
    for model, by_count in means.items():
        print(f"| {model} | " + " | ".join(f"{by_count[count] * 1e3:.1f}" for count in (0, 1, 2, 5)) + " |")
    print()


def _step(run: Run) -> tuple[float, ...]:
    step = run.timing.phase("step") if run.timing else None
    return step.best_s if step else ()


def _milliseconds(run: Run | None) -> str:
    return f"{median(_step(run)) * 1e3:.1f}" if run and _step(run) else "–"


def _gib(size_bytes: int | None) -> str:
    return f"{size_bytes / GIB:.1f}" if size_bytes is not None else "–"


if __name__ == "__main__":
    main(*sys.argv[1:])
