"""The table of layouts on four GPUs: peaks of every rank, measured and predicted.

python -m benchmarks.layout_memory RECORDS.jsonl.gz > table.md     (from the root of the checkout)
"""

import gzip
import statistics
import sys
from pathlib import Path

from steplab.plan.dry_run.machine import Gathering
from steplab.plan.layout.memory import memory_by_rank
from steplab.plan.memory import HOPPER_WORKSPACE
from steplab.records.codec import decode
from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.units import GIB

HEADER = ("layout", "ranks", "step", "allocated", "predicted", "error", "reserved", "predicted", "error")


def rows(run: Run) -> list[tuple[str, ...]]:
    spec = run.spec
    assert spec is not None
    # torch 2.11 composes norms of a stream in fp32 with weights in bf16.
    gathering = Gathering(fused_norms=run.environment is None or not run.environment.torch.startswith("2.11"))
    found: list[tuple[str, ...]] = []
    for rank in memory_by_rank(spec, HOPPER_WORKSPACE.value, gathering=gathering):
        samples = run.ranks[rank.first_rank]
        (peak,) = [each for each in samples.peaks if each.phase == "step"]
        (step,) = [each for each in samples.back_to_back if each.phase == "step"]
        found.append(
            (
                words(spec),
                rank.ranks,
                f"{1e3 * statistics.median(step.best_s):.1f} ms",
                *compared(peak.peak_allocated_bytes, rank.peak_bytes),
                *compared(peak.peak_reserved_bytes, rank.reserved_bytes),
            )
        )
    return found


def compared(real: int, predicted: int) -> tuple[str, str, str]:
    return f"{real / GIB:.2f} GiB", f"{predicted / GIB:.2f} GiB", f"{100 * (predicted / real - 1):+.2f} %"


def words(spec: StepSpec) -> str:
    options = {
        "pipeline-schedule": (spec.pipeline_schedule, "1f1b"),
        "reshard-after-forward": (spec.reshard_after_forward, "auto"),
        "accumulation": (spec.accumulation, 1),
        "checkpointing": (spec.checkpointing, "none"),
        "compile": (spec.compile, "off"),
    }
    return " ".join(
        [str(spec.layout), *(f"--{name} {value}" for name, (value, usual) in options.items() if value != usual)]
    )


def main(records: str) -> None:
    runs = [
        run for run in map(decode, gzip.decompress(Path(records).read_bytes()).splitlines()) if isinstance(run, Run)
    ]
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for run in runs:
        for row in rows(run):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
