"""Walks from plain steps to the fastest that `steplab advise` finds, on a GPU, from the root of the checkout:

    python -m benchmarks.advise_study walks                                   # all cases, one after the other
    python -m benchmarks.advise_study walks --cases 2.7b-2048 large-512 --budget 6min
    python -m benchmarks.advise_study walks --cases 2.7b-2048 --profile       # and profile the first and the last step

The folder gets a store with all runs (advise.db), and of each walk its record (.json), its text (.md) and its page with
the waterfall (.html). `docs/walk/make.py` makes the chapter of the documentation from such stores.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from steplab.cli.app import main as steplab
from steplab.errors import UserError
from steplab.lab.advising import advise
from steplab.lab.profiling import profile
from steplab.records.advice import Advice
from steplab.units import parse_duration

CASES: dict[str, dict[str, Any]] = {
    "2.7b-2048": {"model": "2.7b", "context": 2048, "precision": "fp32", "steps": 10, "warmup": 2},
    "2.7b-512": {"model": "2.7b", "context": 512, "precision": "bf16", "steps": 10, "warmup": 3},
    "xl-512": {"model": "xl", "context": 512, "precision": "bf16", "steps": 30},
    "large-512": {"model": "large", "context": 512, "precision": "bf16", "steps": 30},
    "medium-512": {"model": "medium", "context": 512, "precision": "bf16", "steps": 30},
    "small-512": {"model": "small", "context": 512, "precision": "bf16", "steps": 30},
}
"""Name -> the step that the walk begins with; eager, with plain attention, fused AdamW and batch 4. That of 2.7b at
2,048 positions begins with fp32 and has no room for it; the others begin with bf16 autocast."""


def walk(name: str, folder: Path, budget_s: float) -> Advice:
    """Walk one case and write its record, text and page."""
    store = folder / "advise.db"
    advice = advise(
        name=name, store=store, budget_s=budget_s, on_change=lambda what: print(f"{name}: {what}", flush=True),
        **CASES[name],
    )  # fmt: skip
    for suffix in ("md", "html", "json"):
        steplab(["show", advice.id, "--store", str(store), "--output", str(folder / f"{name}.{suffix}"), "--force"])
    return advice


def profile_ends(advice: Advice, folder: Path) -> None:
    """Profile the fastest step of a walk, and then the first."""
    for spec in (advice.best, advice.spec):
        if spec is not None:
            print(f"{advice.name}: profile", flush=True)
            profile(spec, name=advice.name, store=folder / "advise.db")


def seconds(text: str) -> float:
    """A duration; argparse shows the line of an error of its own type."""
    try:
        return parse_duration(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the store and the reports")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--budget", type=seconds, default=480.0, help="of each walk, such as 6min (8min)")
    parser.add_argument(
        "--profile", action="store_true", help="profile the first and the fastest step of each walk too"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    walks = [walk(name, options.folder, options.budget) for name in options.cases]
    if options.profile:
        for advice in walks:
            profile_ends(advice, options.folder)
    return int(any(advice.failure for advice in walks))


if __name__ == "__main__":
    sys.exit(main())
