"""Runs all attacks, N times the first one's tries, and prints a table: python -m tests.fuzz.attack --times 10.

The first bad end of each kind is printed with seed and command; its file goes to `--keep`, and belongs into
tests/fuzz/cases if small. Exit code 1: a bad end.
"""

import argparse
import contextlib
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.attacks import ATTACKS, Attack, Try
from tests.fuzz.ending import described

MOST_BYTES = 6 << 30
"""Bytes of address space; more ends in a MemoryError, which is a bad end."""
_KIND_LETTERS = 110
_HEADER = ("attack", "tries", "times the first", "bad ends", "longest command", "most memory", "seconds")


@dataclass(kw_only=True)
class Outcome:
    attack: Attack
    done: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    peak_bytes: int = 0
    seconds: float = 0.0

    def row(self) -> tuple[str, ...]:
        times = self.done / self.attack.tries
        counts = (f"{self.done:,}", f"{times:.1f}", str(self.faults.total()), f"{self.longest_s:.1f} s")
        return (self.attack.name, *counts, f"{self.peak_bytes >> 20} MiB", f"{self.seconds:.0f}")


def attacked(attack: Attack, seed: int, tries: int, deadline_s: float, keep: Path | None) -> Outcome:
    outcome, began_s = Outcome(attack=attack), time.monotonic()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for tried in attack.make(random.Random(seed), Path(name)):
            outcome.done += 1
            outcome.longest_s = max(outcome.longest_s, tried.end.seconds)
            outcome.peak_bytes = max(outcome.peak_bytes, tried.end.peak_bytes)
            for fault in tried.faults:
                kind = fault[:_KIND_LETTERS]
                outcome.faults[kind] += 1
                if outcome.faults[kind] == 1:
                    where = f"{attack.name.replace(' ', '_')}-{seed}-{outcome.done}"
                    print(f"[{where}] {described(tried.arguments)[:300]}\n    {fault}", flush=True)
                    _keep(tried, where, keep)
            if outcome.done >= tries or time.monotonic() > deadline_s:
                break
    outcome.peak_bytes = outcome.peak_bytes or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    outcome.seconds = time.monotonic() - began_s
    return outcome


def _keep(tried: Try, where: str, folder: Path | None) -> None:
    if folder and tried.file and tried.file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(tried.file, folder / f"{where}-{tried.file.name}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=float, default=1.0, help="how many times the tries of the first attack")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after so many minutes")
    parser.add_argument("--seed", type=int, default=1, help="beginning of the random numbers")
    parser.add_argument("--only", nargs="*", default=list(ATTACKS), choices=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the files of bad ends")
    given = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    end_s = time.monotonic() + 60 * given.minutes
    outcomes = list[Outcome]()
    for number, name in enumerate(given.only):
        share_s = (end_s - time.monotonic()) / (len(given.only) - number)
        tries = max(1, round(ATTACKS[name].tries * given.times))
        keep = given.keep.absolute() if given.keep else None
        outcomes.append(attacked(ATTACKS[name], given.seed, tries, time.monotonic() + share_s, keep))
    rows = [_HEADER, *(outcome.row() for outcome in outcomes)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_HEADER))]
    print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    print(f"seed {given.seed}; a try is one command, its length in the processor's time")
    return 1 if any(outcome.faults for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
