"""Profiles of small, large and 2.7b, contexts 256 and 1024, fp32 and bf16, eager and compiled; findings tried.

    python -m benchmarks.profile_study STORE [SECONDS]            (from the root of the checkout)
    python -m benchmarks.profile_study STORE SECONDS findings     (profiles of steps with the faults those are free of)
    python -m benchmarks.profile_study STORE SECONDS tried        (then: `explain --try` on one profile of each kind)

One worker a GPU, each cell alone on its GPU.
"""

import itertools
import subprocess
import sys
from pathlib import Path

from benchmarks.workers import run_all

from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.store.database import Store

STEPLAB = [sys.executable, "-m", "steplab"]
# Those that take longest first, so that no worker is left with one at the end.
CELLS = sorted(
    itertools.product(("2.7b", "large", "small"), ("1024", "256"), ("fp32", "bf16"), ("default", "off")),
    key=lambda cell: cell[3],
)
FAULTS = {
    "optimizer": ["--model", "small", "--context", "256", "--precision", "bf16", "--optimizer", "adamw_loop"],
    "head dimension": ["--model", "2.7b", "--context", "1024", "--precision", "bf16", "--attention", "sdpa_flash"],
    "vocabulary": [
        *("--model", "small", "--context", "1024", "--batch", "8", "--precision", "bf16", "--attention", "sdpa"),
        *("--model.vocab-size", "50257"),
    ],
    "waiting": ["--model", "benchmarks.awkward_models:waiting"],
    "growing": [
        *("--model", "benchmarks.awkward_models:growing", "--compile", "default", "--warmup", "3", "--steps", "12"),
    ],
}
"""A step for each finding that none of the cells has, by what is wrong with it."""
TRIED = ("2.7b-1024-bf16-off", "large-1024-fp32-off", "large-1024-bf16-off", "small-256-bf16-off")
"""Eager, because that is what most of the findings are about; and all faults."""


def profile(fields: list[str], name: str, store: str) -> list[str]:
    return [*STEPLAB, "profile", *fields, "--name", name, "--store", store, "--timeout", "5min"]


def fields_of(cell: tuple[str, ...]) -> list[str]:
    model, context, precision, compiled = cell
    return ["--model", model, "--context", context, "--precision", precision, "--compile", compiled]


def tried(store: str) -> list[list[str]]:
    """`explain --try` for the newest profile of each."""
    with Store.open(Path(store), write=False) as opened:
        runs = [run for run in opened.iterate(kind="run") if isinstance(run, Run) and run.profile and run.spec]
    ids = {cell_of(run.spec) if run.name == "profiles" else run.name: run.id for run in runs if run.spec}
    asked = [name for name in (*TRIED, *FAULTS) if name in ids]
    explain = [*STEPLAB, "explain", "--try", "--store", store, "--output"]
    return [[*explain, f"{store}.{name.replace(' ', '-')}.json", ids[name]] for name in asked]


def cell_of(spec: StepSpec) -> str:
    return "-".join((spec.model.name, str(spec.context), spec.precision, spec.compile))


def main(store: str, seconds: str = "3600", what: str = "profiles") -> None:
    commands = {
        "profiles": lambda: [profile(fields_of(cell), "profiles", store) for cell in CELLS],
        "findings": lambda: [profile(fields, name, store) for name, fields in FAULTS.items()],
        "tried": lambda: tried(store),
    }[what]()
    run_all(commands, store, float(seconds))
    subprocess.run([*STEPLAB, "list", "--limit", "60", "--store", store], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
