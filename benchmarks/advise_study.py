"""Walks from plain steps to the fastest that `steplab advise` finds, each within ten minutes:

    python benchmarks/advise_study.py OUT 2.7b-2048     (needs a GPU; from the root of the checkout)

The names are those of CASES; several may be given, and without any, all are walked. OUT gets the store of all runs, and
for each walk its record (.json), its text (.md) and its page with the waterfall (.html).
"""

import sys
from pathlib import Path

from steplab.cli.app import main

CASES = {
    "2.7b-2048": ("2.7b", "2048", "10"),
    "2.7b-512": ("2.7b", "512", "10"),
    "xl-512": ("xl", "512", "30"),
    "large-512": ("large", "512", "30"),
    "medium-512": ("medium", "512", "30"),
    "small-512": ("small", "512", "30"),
}
"""Name -> model, context and measured steps of a side; batch 4, and bf16 autocast as the published steps have it."""
BUDGET = "8min"
"""The rest of ten minutes is for the first and the last step, and for writing."""


def walk(name: str, folder: Path) -> int:
    """Walk one case; returns the exit code of the command."""
    model, context, steps = CASES[name]
    store = ("--store", str(folder / "advise.db"))
    step = ("--model", model, "--context", context, "--precision", "bf16", "--steps", steps)
    text = ("--output", str(folder / f"{name}.md"), "--force")
    code = main(["advise", *step, "--budget", BUDGET, "--name", name, *store, *text])
    for suffix in ("html", "json"):
        main(["show", "last", *store, "--output", str(folder / f"{name}.{suffix}"), "--force"])
    return code


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    sys.exit(max(walk(name, out) for name in sys.argv[2:] or CASES))
