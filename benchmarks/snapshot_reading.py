"""From a memory snapshot of 1 GB to its page: how fast, in how much memory, and how large the page is.

    python -m benchmarks.snapshot_reading [GB] [--frames N] [--rounds N] [--keep FILE]

Makes a snapshot of GB (1.0) as torch.cuda.memory._dump_snapshot writes it: training steps of a Transformer one after
the other, each allocation with a stack of about --frames frames (30 is what stacks="python" records, 90 what "all"
does), which its two releases share, as torch shares them. Then `steplab import-snapshot` and `steplab report` are run
on it. Making the file takes 8 GB of memory.

Every reading is a process of its own, started by a small one; the best of N rounds (3) counts, for everything else that
runs on the machine only slows it down. MB = 1e6 bytes; MiB of peak memory are those of the larger of the two processes,
the command's and the one that reads for it.
"""

import argparse
import gc
import json
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
LAYERS, PER_LAYER = 24, 40
SIZES = (512, 3_000, 40_000, 12 * MIB, 16 * MIB, 64 * MIB)
READERS = {
    "import": "steplab import-snapshot",
    "report": "steplab report --output page.html",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gb", nargs="?", type=float, default=1.0)
    parser.add_argument("--frames", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--read", nargs=3, metavar=("READER", "FILE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read:
        print(json.dumps(read(chosen.read[0], *map(Path, chosen.read[1:]))))
    elif chosen.make:
        print(make(chosen.make, chosen.gb, chosen.frames))
    else:
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = chosen.keep or folder / "snapshot.pickle"
        making = [sys.executable, __file__, str(chosen.gb), "--frames", str(chosen.frames), "--make", str(file)]
        num_events = int(subprocess.run(making, capture_output=True, text=True, check=True).stdout)
        print(f"{file.stat().st_size / 1e9:.2f} GB, {num_events:,} events, stacks of {chosen.frames} frames\n")
        print("| what | seconds | MB/s | CPU seconds | peak MiB |\n|---|---|---|---|---|")
        for reader in READERS:
            result = best(reader, file, folder, chosen.rounds)
            rate = f"{file.stat().st_size / 1e6 / result['seconds']:.0f}" if reader != "report" else ""
            figures = (
                f"{result['seconds']:.1f} | {rate} | {result['cpu_seconds']:.1f} | {result['peak_bytes'] / MIB:.0f}"
            )
            print(f"| {READERS[reader]} | {figures} |")
        print(f"\nThe page has {(folder / 'page.html').stat().st_size / 1e3:.0f} kB.")


def make(path: Path, gb: float, num_frames: int) -> int:
    """Write a snapshot of about `gb` GB; how many events that is."""
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
        lists = [list(stack) for stack in stacks]  # a new list each time, of frames that are the same: as torch has it
        order = [("alloc", number) for number in range(len(stacks))]
        for number in reversed(range(len(stacks))):
            order += [("free_requested", number), ("free_completed", number)]
        for action, number in order:
            time_us += 7
            events.append(event(action, *blocks[number], time_us, lists[number]))
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
    snapshot = {"segments": segments, "device_traces": [events], "allocator_settings": settings}
    gc.disable()
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)
    return len(events)


def event(action: str, address: int, size: int, time_us: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "compile_context": "",
        "user_metadata": "",
        "frames": frames,
    }


def segment(address: int, size: int) -> dict[str, Any]:
    free = {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": 0,
        "active_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [free],
    }


def best(reader: str, file: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Least seconds and largest peak of some readings."""
    results = []
    for _ in range(rounds):
        command = [sys.executable, __file__, "--read", reader, str(file), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        "seconds": min(result["seconds"] for result in results),
        "cpu_seconds": min(result["cpu_seconds"] for result in results),
        "peak_bytes": max(result["peak_bytes"] for result in results),
    }


def read(reader: str, file: Path, folder: Path) -> dict[str, float]:
    """Read a snapshot in this process, or make a page of what was stored of it; users wait for imports, too."""
    from steplab.cli.app import main as steplab

    store = folder / "store.db"
    if reader == "import":
        store.unlink(missing_ok=True)
        command = ["import-snapshot", str(file), "--output", str(folder / "table.txt")]
    else:
        command = ["report", "--output", str(folder / "page.html")]
    started = time.perf_counter()
    assert steplab([*command, "--store", str(store), "--force"]) == 0
    seconds = time.perf_counter() - started
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": seconds,
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in used),
        "peak_bytes": max(each.ru_maxrss for each in used) * 1024,
    }


if __name__ == "__main__":
    main()
