"""Time and memory of commands on large inputs, from process start to exit.

    python -m benchmarks.commands store [--records 100000]      # every command on a store of that many records
    python -m benchmarks.commands snapshot [--gb 1.0] [--frames 30] [--repeats 3]

Records have 10 measured steps; half are in studies of 100 cells. Building a snapshot of 1 GB takes 8 GB of memory.
Reported are medians over repeats, and the largest resident set. `steplab --version` is the floor.
"""

import argparse
import gc
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from steplab.records.codec import encode
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.specs.model import model_spec
from steplab.specs.step import StepSpec
from steplab.store.database import Store
from steplab.store.record_table import ForeignRecord
from steplab.units import MIB, format_bytes

Commands = Iterator[tuple[str, tuple[str, ...]]]
STEPS = 10
BATCH = 1000
ENVIRONMENT = Environment(
    device=DeviceInfo(kind="cpu", name="benchmark"),
    host="Linux x86_64",
    cpu="benchmark",
    num_cpus=2,
    python="3.12.0",
    torch="2.13.0",
    variables={"OMP_NUM_THREADS": "2"},
)


LAUNCHER = """
import os, resource, subprocess, sys, time
start_s = time.perf_counter()
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(code, time.perf_counter() - start_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""
"""Starts a command from a small process, because the largest resident set includes the starter's."""


def timed(arguments: Sequence[str], repeats: int) -> tuple[list[float], list[float], float]:
    """Elapsed and processor seconds of each run of `steplab`, and the largest peak in bytes."""
    samples, processor, peaks = list[float](), list[float](), list[float]()
    command = [sys.executable, "-S", "-c", LAUNCHER, sys.executable, "-m", "steplab", *arguments]
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "160"})
        code, *figures = map(float, done.stdout.split())
        if code:
            raise SystemExit(f"{' '.join(arguments)} failed")
        for found, figure in zip((samples, processor, peaks), figures, strict=True):
            found.append(figure)
        for written in (word for word in arguments if Path(word).suffix in (".gz", ".html")):
            Path(written).unlink()
    return samples, processor, max(peaks)


# --- a store ------------------------------------------------------------------------------------------------------


def run_of(number: int) -> Run:
    """A record with its own id, time, context and samples."""
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
    with Store.open(path, write=True) as store:
        for first in range(0, num_records, BATCH):
            runs = map(run_of, range(first, min(first + BATCH, num_records)))
            store.import_records([ForeignRecord(where=run.id, body=encode(run)) for run in runs])


def store_commands(folder: Path, options: argparse.Namespace) -> Commands:
    path, num_records = folder / "store.db", options.records
    build(path, num_records)
    store = ("--store", str(path))
    one, few = run_of(num_records // 2).id, [run_of(number).id for number in range(1, 13, 2)]
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
    yield "store check", ("store", "check", *store)
    yield "store backup", ("store", "backup", *store, str(folder / f"backup-{time.time_ns()}.db"))


# --- a memory snapshot ---------------------------------------------------------------------------------------------

LAYERS, PER_LAYER = 24, 40
SIZES = (512, 3_000, 40_000, 12 * MIB, 16 * MIB, 64 * MIB)


def snapshot_commands(folder: Path, options: argparse.Namespace) -> Commands:
    file, store = folder / "snapshot.pickle", str(folder / "store.db")
    write_snapshot(file, options.gb, options.frames)
    yield "import-snapshot", ("import-snapshot", str(file), "--store", store)
    yield "report --output page.html", ("report", "--store", store, "--output", str(folder / "page.html"))


def write_snapshot(path: Path, gb: float, num_frames: int) -> None:
    """Write a snapshot of about `gb` GB, with stacks of about `num_frames`; both releases share their allocation's
    stack, as in torch.
    """
    chance = random.Random(0)
    frames = [
        {"name": "_call_impl", "filename": f"/venv/lib/python3.12/site-packages/torch/nn/modules/m{i}.py", "line": i}
        for i in range(400)
    ]
    stacks = [
        [chance.choice(frames) for _ in range(chance.randint(num_frames // 2, num_frames * 3 // 2))]
        for _ in range(LAYERS * PER_LAYER)
    ]
    address, blocks, segments = 0x7F0000000000, list[tuple[int, int]](), list[dict[str, Any]]()
    for _ in stacks:
        size = chance.choice(SIZES)
        held = max(2 * MIB, -(-size // (2 * MIB)) * 2 * MIB)
        blocks.append((address, size))
        segments.append(segment(address, held))
        address += held
    num_steps = max(1, round(gb * 1e9 / (len(stacks) * (5 * num_frames + 230))))
    events, time_us = list[dict[str, Any]](), 1_763_000_000_000_000
    for _ in range(num_steps):
        lists = [list(stack) for stack in stacks]  # new lists of the same frames, as in torch
        order = [("alloc", number) for number in range(len(stacks))]
        for number in reversed(range(len(stacks))):
            order += [("free_requested", number), ("free_completed", number)]
        for action, number in order:
            time_us += 7
            address, size = blocks[number]
            of_event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us}
            events.append(of_event | {"compile_context": "", "user_metadata": "", "frames": lists[number]})
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
    snapshot = {"segments": segments, "device_traces": [events], "allocator_settings": settings}
    gc.disable()
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)


def segment(address: int, size: int) -> dict[str, Any]:
    free = {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
    kept = {
        "total_size": size,
        "allocated_size": 0,
        "active_size": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
    }
    where = {"device": 0, "address": address, "stream": 0, "is_expandable": False, "frames": []}
    return where | kept | {"blocks": [free]}


INPUTS = {"store": store_commands, "snapshot": snapshot_commands}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", choices=INPUTS)
    parser.add_argument("--records", type=int, default=100_000, help="number of records")
    parser.add_argument("--gb", type=float, default=1.0, help="1e9 bytes of the file")
    parser.add_argument("--frames", type=int, default=30, help="of a stack; 90 is what stacks='all' records")
    parser.add_argument("--repeats", type=int, default=1, help="number of runs of each command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"| command | time, median of {options.repeats} (s) | processor time (s) | peak memory |")
        print("|---|---|---|---|")
        for label, arguments in [("--version", ("--version",)), *INPUTS[options.input](Path(folder), options)]:
            samples, processor, peak_bytes = timed(arguments, options.repeats)
            figures = f"{median(samples):.2f} | {median(processor):.2f} | {format_bytes(peak_bytes)}"
            print(f"| `{label}` | {figures} |", flush=True)
        for path in sorted(Path(folder).iterdir()):
            print(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
