"""Runs all attacks, N times the tries of the first one, and prints a table: python -m tests.fuzz.attack --times 10.

Each bad end is printed with its seed and command when it is met, and its file is kept in the folder --keep.
"""

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.attacks import ATTACKS, Attack
from tests.fuzz.ending import described

MOST_BYTES = 6 << 30
"""The most address space that the process may take; what asks for more ends in a MemoryError, which is a bad end."""


def attacked(
    attack: Attack, seed: int, tries: int, deadline_s: float, keep: Path | None
) -> tuple[int, Counter[str], float]:
    """Run one attack; returns the number of tries, the bad ends by their kind, and the longest command in seconds."""
    faults, longest_s, done = Counter[str](), 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = Path.cwd()
        os.chdir(folder)
        try:
            for number, tried in enumerate(attack.make(random.Random(seed), folder)):
                done = number + 1
                longest_s = max(longest_s, tried.end.seconds)
                for fault in tried.faults:
                    kind = fault[:110]
                    faults[kind] += 1
                    if faults[kind] == 1:
                        print(
                            f"[{attack.name}, seed {seed}, try {done}] {described(tried.arguments)[:300]}\n    {fault}",
                            flush=True,
                        )
                        if keep and tried.file and tried.file.exists():
                            keep.mkdir(parents=True, exist_ok=True)
                            shutil.copy(
                                tried.file, keep / f"{attack.name.replace(' ', '_')}-{seed}-{done}-{tried.file.name}"
                            )
                if done >= tries or time.monotonic() > deadline_s:
                    break
        finally:
            os.chdir(before)
    return done, faults, longest_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=float, default=1.0, help="how many times the tries of the first attack")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after so many minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(ATTACKS), choices=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the files of bad ends")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    began_s = time.monotonic()
    rows, num_bad = [], 0
    for number, name in enumerate(given.only):
        attack = ATTACKS[name]
        left_s = given.minutes * 60 - (time.monotonic() - began_s)
        share_s = left_s / (len(given.only) - number)
        start_s = time.monotonic()
        tries = max(1, round(attack.tries * given.times))
        done, faults, longest_s = attacked(
            attack, given.seed, tries, start_s + share_s, given.keep and given.keep.absolute()
        )
        bad = sum(faults.values())
        num_bad += bad
        rows.append(
            (
                name,
                f"{done:,}",
                f"{done / attack.tries:.1f}",
                f"{bad}",
                f"{longest_s:.1f} s",
                f"{time.monotonic() - start_s:.0f} s",
            )
        )
    print()
    header = ("attack", "tries", "times the first", "bad ends", "longest command", "time")
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak_mib:.0f} MiB; seed {given.seed}")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
