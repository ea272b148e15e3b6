"""How long `steplab list` takes on a store of 10,000 records: process start to exit, as a user waits for it.

    python benchmarks/list_10k.py

Builds the store in a temporary folder, each record with 10 measured steps. Start-up of Python with
`steplab --version` is timed beside it, for that is what no store can make faster.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from steplab.records.codec import encode
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.specs.model import model_spec
from steplab.specs.step import StepSpec
from steplab.store.database import Store

NUM_RECORDS = 10_000
NUM_REPEATS = 7
STEPS = 10
ENVIRONMENT = Environment(
    device=DeviceInfo(kind="cpu", name="benchmark"),
    host="Linux x86_64",
    cpu="benchmark",
    num_cpus=2,
    python="3.12.0",
    torch="2.13.0",
    variables={"OMP_NUM_THREADS": "2"},
)


def record_lines() -> Iterator[bytes]:
    """Records that differ in id, time, context and samples; half of them belong to studies of 100 cells."""
    for number in range(NUM_RECORDS):
        yield encode(_run(number))


def _run(number: int) -> Run:
    phases = tuple(
        PhaseSamples(
            phase=name,
            device_s=tuple(share * (1 + (number * 7919 + step) % 1009 / 9973) for step in range(STEPS)),
            host_s=tuple(share * (1 + (number * 7907 + step) % 1013 / 9967) for step in range(STEPS)),
        )
        for name, share in (("step", 0.1), ("forward", 0.03), ("backward", 0.06), ("optimizer", 0.01))
    )
    minute, second = divmod(number, 60)
    return Run(
        id=f"{number * 2654435761 % 2**48:012x}",
        created_utc=f"2026-11-{1 + minute // 1440:02}T{minute // 60 % 24:02}:{minute % 60:02}:{second:02}Z",
        steplab_version="0.0.0",
        name=f"study {number // 200}" if number % 2 else "",
        study=f"{number // 200:012x}" if number % 2 else None,
        spec=StepSpec(model=model_spec("small"), context=128 + number),
        tokens_per_step=4 * (128 + number),
        environment=ENVIRONMENT,
        timing=Timing(warmup=phases, back_to_back=phases, synchronised=phases),
    )


def times_s(*arguments: str) -> list[float]:
    """Wall-clock time of each of several runs of `steplab` with these arguments."""
    samples = []
    for _ in range(NUM_REPEATS):
        start_s = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "steplab", *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"COLUMNS": "160"},
        )
        samples.append(time.perf_counter() - start_s)
    return samples


def show(label: str, samples: list[float]) -> None:
    """Print the median and the range of the samples."""
    print(f"{label:<44} median {median(samples):.3f} s  ({min(samples):.3f} to {max(samples):.3f})")


def main() -> None:
    """Build the store, then time what a user would type."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with Store.open(path, write=True) as store:
            num_added, _ = store.import_lines(record_lines())
        print(f"{num_added} records, {path.stat().st_size / 1e6:.0f} MB, {NUM_REPEATS} repeats each")
        in_process = []
        for _ in range(NUM_REPEATS):
            start_s = time.perf_counter()
            with Store.open(path, write=False) as store:
                store.rows()
            in_process.append(time.perf_counter() - start_s)
        show("Store.rows(), all, in process", in_process)
        show("steplab --version", times_s("--version"))
        listing = ("list", "--store", str(path), "--limit")
        show("steplab list --limit 20", times_s(*listing, "20"))
        show(f"steplab list --limit {NUM_RECORDS}", times_s(*listing, str(NUM_RECORDS)))
        everything = times_s(*listing, str(NUM_RECORDS), "--format", "json")
        show(f"steplab list --limit {NUM_RECORDS} --format json", everything)


if __name__ == "__main__":
    main()
