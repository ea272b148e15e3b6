"""The table of peaks: measured by the allocator, predicted by a dry run, and what they are made of.

python -m benchmarks.memory_table RECORDS.jsonl.xz > table.md     (from the root of the checkout)
"""

import lzma
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from steplab.plan.memory import predict_memory
from steplab.records.codec import decode
from steplab.records.memory_profile import MEMORY_CATEGORIES
from steplab.records.run import Run
from steplab.units import GIB

FIELDS = ("model", "context", "pass", "precision", "attention", "optimizer", "compile", "checkpointing")
HEADER = (*FIELDS, "peak, bytes", "GiB", "predicted, bytes", "error", *(c.replace("_", " ") for c in MEMORY_CATEGORIES))


def cells(run: Run) -> tuple[str, ...]:
    spec, memory = run.spec, run.memory_profile
    assert spec is not None
    assert memory is not None
    predicted = predict_memory(spec).peak_bytes
    return (
        *(spec.model.name, str(spec.context), spec.pass_name, spec.precision, spec.attention, spec.optimizer),
        *(spec.compile, spec.checkpointing),
        *(f"{memory.peak_bytes:,}", f"{memory.peak_bytes / GIB:.2f}", f"{predicted:,}"),
        f"{100 * (predicted / memory.peak_bytes - 1):+.3f} %",
        *(f"{memory.at_peak.get(category, 0) / GIB:.3f}" for category in MEMORY_CATEGORIES),
    )


def error(run: Run) -> float:
    assert run.spec is not None
    assert run.memory_profile is not None
    return abs(predict_memory(run.spec).peak_bytes / run.memory_profile.peak_bytes - 1)


def verdict(what: str, runs: Iterable[Run]) -> str:
    found = [error(run) for run in runs]
    return f"{what}: {len(found)} cells, median error {100 * median(found):.4f} %, worst {100 * max(found):.3f} %."


def main(records: str) -> None:
    decoded = map(decode, lzma.decompress(Path(records).read_bytes()).splitlines())
    runs = [run for run in decoded if isinstance(run, Run) and run.memory_profile and run.spec]
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for row in sorted(map(cells, runs), key=lambda row: (row[6], row[0], int(row[1]), *row[2:8])):
        print("| " + " | ".join(row) + " |")
    print()
    print(verdict("Eager", (run for run in runs if run.spec and run.spec.compile == "off")))
    print(verdict("Compiled", (run for run in runs if run.spec and run.spec.compile != "off")))


if __name__ == "__main__":
    main(*sys.argv[1:])
