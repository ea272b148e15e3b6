"""How fast traces are read, and in how much memory: steplab, Python's json and Holistic Trace Analysis in one run.

    python -m benchmarks.trace_reading [TRACE] [GB] [--peers-gb GB] [--hta-python PATH] [--rounds N]

Repeats the events of TRACE (a Kineto trace, plain or gzip; by default a CPU step of `small` with Python stacks,
profiled here) to a plain JSON trace of GB (2), with times and ids moved on at each repetition, and reads it with
steplab. The peers hold all of a trace in memory at least once, so they get a smaller one (--peers-gb, 0.3), and steplab
reads that too. HTA is run under the interpreter of --hta-python, where it is installed; its reader comes in two kinds,
of which the second needs ijson there.

Every reading is a process of its own, started by a small one; the best of N rounds (3) counts, for everything else that
runs on the machine only slows it down. MB = 1e6 bytes; MiB of peak memory are those of the whole process.
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READERS = {"steplab": "steplab", "json": "json.load", "hta": "HTA, json", "hta_ijson": "HTA, ijson"}
_SHIFTED = re.compile(rb'("(?:ts|correlation|External id|id|Ev Idx|Record function id)": ?)(\d+)')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("gb", nargs="?", type=float, default=2.0)
    parser.add_argument("--peers-gb", type=float, default=0.3)
    parser.add_argument("--hta-python", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", nargs=2, metavar=("READER", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read:
        print(json.dumps(read(*chosen.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = chosen.trace or profile_step(Path(folder) / "step.json")
        rows = []
        for gb, readers in ((chosen.gb, ["steplab"]), (chosen.peers_gb, list(READERS))):
            big = Path(folder) / "big.json"
            repeats, num_events = repeat(trace, big, gb)
            for reader in readers:
                python = chosen.hta_python if reader.startswith("hta") else sys.executable
                if python is not None:
                    rows.append((reader, big.stat().st_size, num_events, best(python, reader, big, chosen.rounds)))
            print(f"{big.stat().st_size / 1e9:.2f} GB: {repeats} x {trace.name}, {num_events} events", file=sys.stderr)
            big.unlink()
    print_table(rows)


def profile_step(path: Path) -> Path:
    """A training step of `small` on the CPU under torch.profiler, with shapes and Python stacks."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from steplab.measurement.machine.device import open_device
    from steplab.measurement.step.step import make_step
    from steplab.model.build import build_workload
    from steplab.specs.resolve import resolve_step

    spec = resolve_step({"model": "small", "context": "128", "precision": "fp32", "device": "cpu"})
    device = open_device("cpu").torch_device
    phases = make_step(build_workload(spec, device), spec, device).phases
    for phase in phases:
        phase.run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as profiler:
        for phase in phases:
            with record_function(phase.name):
                phase.run()
    profiler.export_chrome_trace(str(path))
    return path


def repeat(trace: Path, target: Path, gb: float) -> tuple[int, int]:
    """Write a trace of about `gb` GB; how often the events are in it, and how many that makes.

    The text stays as the profiler wrote it, so that it is as long, and as hard to split, as a real one.
    """
    raw = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    begin = raw.index(b"[", raw.index(b'"traceEvents"'))
    events, length = json.JSONDecoder().raw_decode(raw[begin:].decode("latin-1"))
    head, body, tail = raw[: begin + 1], raw[begin + 1 : begin + length - 1].rstrip(), raw[begin + length - 1 :]
    timed = [event for event in events if "dur" in event]
    step_us = int(max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed)) + 1
    highest_id = max(int(event.get("args", {}).get("correlation", 0)) for event in events) + len(events)
    texts = _SHIFTED.split(body)
    numbers = [
        (place, int(texts[place]), step_us if b"ts" in texts[place - 1] else highest_id)
        for place in range(2, len(texts), 3)
    ]
    count = max(1, round(gb * 1e9 / len(body)))
    with target.open("wb") as file:
        file.write(head)
        for number in range(count):
            for place, value, shift in numbers:
                texts[place] = str(value + number * shift).encode()
            file.write((b"," if number else b"") + b"".join(texts))
        file.write(tail)
    return count, count * len(events)


def best(python: Path | str, reader: str, trace: Path, rounds: int) -> dict[str, float] | str:
    """Least seconds and largest peak of some readings; the last line of the error where it failed."""
    results = []
    for _ in range(rounds):
        command = [str(python), __file__, "--read", reader, str(trace)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        "seconds": min(result["seconds"] for result in results),
        "cpu_seconds": min(result["cpu_seconds"] for result in results),
        "peak_bytes": max(result["peak_bytes"] for result in results),
    }


def read(reader: str, trace: str) -> dict[str, float]:
    """Read a trace in this process; its imports are not timed."""
    if reader == "steplab":
        from steplab.reading.traces.reading import read_trace

        def run() -> object:
            return read_trace(Path(trace))

    elif reader == "json":

        def run() -> object:
            with open(trace, encoding="utf-8") as file:
                return json.load(file)

    else:
        from hta.common.trace_parser import parse_trace_dataframe
        from hta.configs.parser_config import ParserBackend, ParserConfig

        config = ParserConfig.get_default_cfg()
        if reader == "hta_ijson":
            import ijson  # noqa: F401 (HTA imports it late; its absence should not cost a reading)

            config.set_parser_backend(ParserBackend.IJSON_BATCH_AND_COMPRESS)
        else:
            config.set_parser_backend(ParserBackend.JSON)

        def run() -> object:
            return parse_trace_dataframe(trace, config)

    started, cpu_started = time.perf_counter(), time.process_time()
    result = run()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    assert result is not None
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Most memory this process has had. On Linux its own: getrusage would count that of who started it too."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024  # type: ignore[index]
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def print_table(rows: list[tuple[str, int, int, dict[str, float] | str]]) -> None:
    print("| reader | trace | events | seconds | MB/s | CPU seconds | peak MiB |")
    print("|---|---|---|---|---|---|---|")
    for reader, size_bytes, num_events, result in rows:
        start = f"| {READERS[reader]} | {size_bytes / 1e9:.2f} GB | {num_events:,} |"
        if isinstance(result, str):
            print(f"{start} {result} | | | |")
        else:
            seconds, peak_mib = result["seconds"], result["peak_bytes"] / 2**20
            rate, cpu_seconds = size_bytes / 1e6 / seconds, result["cpu_seconds"]
            print(f"{start} {seconds:.2f} | {rate:.0f} | {cpu_seconds:.2f} | {peak_mib:.0f} |")


if __name__ == "__main__":
    main()
