"""Profiles of small, large and 2.7b, contexts 256 and 1024, fp32 and bf16, eager and compiled; and findings tried.

    python benchmarks/profile_study.py STORE [SECONDS]            (from the root of the checkout)
    python benchmarks/profile_study.py STORE SECONDS tried        (then: `explain --try` on one profile of each kind)

One worker a GPU, each cell alone on its GPU.
"""

import itertools
import subprocess
import sys
from pathlib import Path

from workers import run_all

from steplab.records.run import Run
from steplab.store.database import Store

STEPLAB = [sys.executable, "-m", "steplab"]
# Those that take longest first, so that no worker is left with one at the end.
CELLS = sorted(
    itertools.product(("2.7b", "large", "small"), ("1024", "256"), ("fp32", "bf16"), ("default", "off")),
    key=lambda cell: cell[3],
)
TRIED = (
    ("small", "256", "bf16", "off"),
    ("large", "1024", "fp32", "off"),
    ("large", "1024", "bf16", "off"),
    ("2.7b", "1024", "bf16", "off"),
)
"""Eager, because that is what most of the findings are about."""


def profile(cell: tuple[str, ...], store: str) -> list[str]:
    model, context, precision, compiled = cell
    fields = ["--model", model, "--context", context, "--precision", precision, "--compile", compiled]
    return [*STEPLAB, "profile", *fields, "--name", "profiles", "--store", store, "--timeout", "5min"]


def profiles_of(store: str) -> dict[tuple[str, ...], str]:
    """Ids of the stored profiles, by cell."""
    with Store.open(Path(store), write=False) as opened:
        runs = [run for run in opened.iterate(kind="run") if isinstance(run, Run) and run.profile and run.spec]
    return {
        (run.spec.model.name, str(run.spec.context), run.spec.precision, run.spec.compile): run.id
        for run in runs
        if run.spec
    }


def main(store: str, seconds: str = "3600", what: str = "profiles") -> None:
    known = profiles_of(store) if what == "tried" else {}
    if what == "tried":
        commands = [
            [*STEPLAB, "explain", known[cell], "--try", "--store", store, "--output", f"{store}.{'-'.join(cell)}.json"]
            for cell in TRIED
            if cell in known
        ]
    else:
        commands = [profile(cell, store) for cell in CELLS]
    run_all(commands, store, float(seconds))
    subprocess.run([*STEPLAB, "list", "--limit", "60", "--store", store], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
