"""How long commands take, and how much memory, on a store of 100,000 records: from process start to exit.

    python -m benchmarks.long_store
    python -m benchmarks.long_store --records 10000 --repeats 7

Builds the store in a temporary folder, or takes that of --store. Each record has 10 measured steps, and half of the
records are in studies of 100 cells. Then each command runs as a user runs it. Peak memory is the largest resident set
of the process. `steplab --version` beside them is what no store can make faster.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from steplab.records.codec import encode
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.specs.model import model_spec
from steplab.specs.step import StepSpec
from steplab.store.database import Store
from steplab.store.record_table import ForeignRecord
from steplab.units import format_bytes

STEPS = 10
BATCH = 1000
"""Number of records that are stored in one transaction."""
ENVIRONMENT = Environment(
    device=DeviceInfo(kind="cpu", name="benchmark"),
    host="Linux x86_64",
    cpu="benchmark",
    num_cpus=2,
    python="3.12.0",
    torch="2.13.0",
    variables={"OMP_NUM_THREADS": "2"},
)


def run_of(number: int) -> Run:
    """A record that differs from the others in id, time, context and samples."""
    phases = tuple(
        PhaseSamples(
            phase=name,
            device_s=tuple(share * (1 + (number * 7919 + step) % 1009 / 9973) for step in range(STEPS)),
            host_s=tuple(share * (1 + (number * 7907 + step) % 1013 / 9967) for step in range(STEPS)),
        )
        for name, share in (("step", 0.1), ("forward", 0.03), ("backward", 0.06), ("optimizer", 0.01))
    )
    minute, second = divmod(number, 60)
    day, minute = divmod(minute, 1440)
    month, day = divmod(day, 28)
    return Run(
        id=f"{number * 2654435761 % 2**48:012x}",
        created_utc=f"2026-{1 + month:02}-{1 + day:02}T{minute // 60:02}:{minute % 60:02}:{second:02}Z",
        steplab_version="0.0.0",
        name=f"study {number // 200}" if number % 2 else "",
        study=f"{number // 200:012x}" if number % 2 else None,
        spec=StepSpec(model=model_spec("small"), context=128 + number % 30000),
        tokens_per_step=4 * (128 + number % 30000),
        environment=ENVIRONMENT,
        timing=Timing(warmup=phases, back_to_back=phases, synchronised=phases),
    )


def build(path: Path, num_records: int) -> None:
    """Make the store."""
    with Store.open(path, write=True) as store:
        for first in range(0, num_records, BATCH):
            runs = map(run_of, range(first, min(first + BATCH, num_records)))
            store.import_records([ForeignRecord(where=run.id, body=encode(run)) for run in runs])


def timed(arguments: Sequence[str], repeats: int) -> tuple[list[float], list[float], int]:
    """Seconds by the clock and of the processor for each run of `steplab`, and the largest peak memory in bytes."""
    samples, processor, peak_bytes = [], [], 0
    for _ in range(repeats):
        start_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "steplab", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"COLUMNS": "160"},
        )
        _, status, used = os.wait4(process.pid, 0)
        samples.append(time.perf_counter() - start_s)
        processor.append(used.ru_utime + used.ru_stime)
        if status:
            raise SystemExit(f"{' '.join(arguments)} failed")
        for written in (word for word in arguments if Path(word).suffix in (".gz", ".csv")):
            Path(written).unlink()
        peak_bytes = max(peak_bytes, used.ru_maxrss * 1024)
    return samples, processor, peak_bytes


def commands(path: Path, folder: Path, num_records: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and arguments of each command."""
    store = ("--store", str(path))
    one, few = run_of(num_records // 2).id, [run_of(number).id for number in range(1, 13, 2)]
    yield "--version", ("--version",)
    yield "list --limit 20", ("list", *store, "--limit", "20")
    yield "list --where context=1000 --limit 20", ("list", *store, "--where", "context=1000", "--limit", "20")
    yield "list --sort step_time_s --limit 20", ("list", *store, "--sort", "step_time_s", "--limit", "20")
    yield "list --kind study --limit 20", ("list", *store, "--kind", "study", "--limit", "20")
    yield "show ID", ("show", *store, one)
    yield "report ID ID ID ID ID ID", ("report", *store, *few)
    yield "report --study ID", ("report", *store, "--study", f"{num_records // 400:012x}")
    yield "report", ("report", *store)
    yield "export --study ID", ("export", *store, "--study", f"{num_records // 400:012x}")
    packed = str(folder / "all.jsonl.gz")
    yield "export --format jsonl --output all.jsonl.gz", ("export", *store, "--format", "jsonl", "--output", packed)
    yield "export --output all.csv", ("export", *store, "--output", str(folder / "all.csv"))
    yield "store check", ("store", "check", *store)
    yield "store backup", ("store", "backup", *store, str(folder / f"backup-{time.time_ns()}.db"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000, help="number of records")
    parser.add_argument("--store", type=Path, help="store that an earlier call built, with the same number of records")
    parser.add_argument("--repeats", type=int, default=1, help="number of runs of each command")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = given.store or Path(name) / "store.db"
        if not path.exists():
            build(path, given.records)
        print(f"{given.records} records, {path.stat().st_size / 1e6:.0f} MB\n")
        print(f"| command | time, median of {given.repeats} (s) | processor time (s) | peak memory |")
        print("|---|---|---|---|")
        for label, arguments in commands(path, Path(name), given.records):
            samples, processor, peak_bytes = timed(arguments, given.repeats)
            figures = f"{median(samples):.2f} | {median(processor):.2f} | {format_bytes(peak_bytes)}"
            print(f"| `{label}` | {figures} |", flush=True)


if __name__ == "__main__":
    main()
