"""Runs all attacks, N times the first one's tries, with a line for each: python -m tests.fuzz.attack --times 10.

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
from pathlib import Path

from tests.fuzz.attacks import ATTACKS, Attack, Try
from tests.fuzz.ending import described

MOST_BYTES = 6 << 30
"""Bytes of address space; more ends in a MemoryError, which is a bad end."""
_KIND_LETTERS = 110


def attacked(attack: Attack, seed: int, tries: int, deadline_s: float, keep: Path | None) -> int:
    """Number of bad ends."""
    done, longest_s, faults = 0, 0.0, Counter[str]()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for tried in attack.make(random.Random(seed), Path(name)):
            done += 1
            longest_s = max(longest_s, tried.end.seconds)
            for fault in tried.faults:
                kind = fault[:_KIND_LETTERS]
                faults[kind] += 1
                if faults[kind] == 1:
                    where = f"{attack.name.replace(' ', '_')}-{seed}-{done}"
                    print(f"[{where}] {described(tried.arguments)[:300]}\n    {fault}", flush=True)
                    _keep(tried, where, keep)
            if done >= tries or time.monotonic() > deadline_s:
                break
    counts = f"{done:,} tries, {faults.total()} bad ends, the longest command {longest_s:.1f} s of the processor's time"
    print(f"{attack.name}, seed {seed}: {counts}", flush=True)
    return faults.total()


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
    bad_ends = 0
    for number, name in enumerate(given.only):
        share_s = (end_s - time.monotonic()) / (len(given.only) - number)
        tries = max(1, round(ATTACKS[name].tries * given.times))
        keep = given.keep.absolute() if given.keep else None
        bad_ends += attacked(ATTACKS[name], given.seed, tries, time.monotonic() + share_s, keep)
    return 1 if bad_ends else 0


if __name__ == "__main__":
    sys.exit(main())
