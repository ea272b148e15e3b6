"""What a record from outside must be: every recorded one passes, and what no steplab writes is refused by its path."""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.profiles import cpu_run, imported_run, launch_bound_run
from tests.runs import make_run, out_of_memory, recorder_run
from tests.unit.memory_records import imported_snapshot, watched_run

from steplab.errors import SteplabError
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.timing import PhaseSamples, Timing
from steplab.records.validation import check

REPOSITORY = Path(__file__).parents[2]
RECORDED = sorted(
    path
    for folder in ("tests/golden", "benchmarks/results")
    for path in (REPOSITORY / folder).glob("*.jsonl*")
    if not path.name.startswith("findings")  # of records, and no records
)


def records_in(path: Path) -> Iterator[Record]:
    content = path.read_bytes()
    unpack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}
    yield from map(decode, unpack.get(path.suffix, bytes)(content).splitlines())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_every_recorded_record_passes(path: Path) -> None:
    kinds = set()
    for record in records_in(path):
        check(record)
        kinds.add(record.schema)
    assert kinds


def test_all_kinds_but_ceilings_are_among_the_recorded() -> None:
    kinds = {record.schema for path in RECORDED for record in records_in(path)}
    assert {kind.split(".")[1].split("/")[0] for kind in kinds} >= {"run", "numerics", "attention", "comm", "ddp"}


@pytest.mark.parametrize(
    "record",
    [
        *(make_run(), out_of_memory(), recorder_run(), launch_bound_run(), cpu_run(), imported_run()),
        *(imported_snapshot(), watched_run(), make_benchmark(), make_comm(), make_ddp_run()),
    ],
)
def test_made_records_pass(record: Record) -> None:
    check(decode(encode(record)))


def test_a_pipeline_is_a_phase_of_a_step() -> None:
    phases = tuple(PhaseSamples(phase=name, host_s=(1.0, 2.0)) for name in ("pipeline", "optimizer", "step"))
    check(make_run(timing=Timing(warmup=phases, back_to_back=phases)))


PROFILED, WATCHED, ATTENTION = launch_bound_run(), watched_run(), make_benchmark()
COMM, DDP = make_comm(), make_ddp_run()
BAD: dict[str, tuple[Record, tuple[str | int, ...], Any, str]] = {
    "an id of control characters": (make_run(), ("id",), "a\x1b[2J", "id must be up to 64 letters"),
    "an empty id": (make_run(), ("id",), "", "id must be up to 64 letters"),
    "no time": (make_run(), ("created_utc",), "yesterday", "created_utc must be a time"),
    "no such day": (make_run(), ("created_utc",), "2026-13-41T07:30:00Z", "created_utc must be a time"),
    "a name that steers": (make_run(), ("name",), "a\rb", r"name has the control character '\r' at position 1"),
    "a note that turns": (make_run(), ("notes",), ["\u202eabc"], r"notes[0] has the control character '\u202e'"),
    "a negative time": (
        make_run(),
        ("timing", "back_to_back", 0, "device_s", 2),
        -1.0,
        "timing.back_to_back[0].device_s[2] must not be negative, but is -1",
    ),
    "an absurd time": (make_run(), ("timing", "back_to_back_host_s"), 1e300, "must be below 1e+18, not 1e+300"),
    "absurd FLOPs": (make_run(), ("utilizations", 0, "flops"), 1e300, "utilizations[0].flops must be below 1e+30"),
    "a long integer": (make_run(), ("tokens_per_step",), 10**40, "tokens_per_step must be below 1e+18"),
    "no samples": (make_run(), ("timing", "back_to_back", 1, "device_s"), [], "timing.back_to_back[1] has no samples"),
    "fewer samples": (
        make_run(),
        ("timing", "back_to_back", 1, "device_s"),
        [0.1],
        "timing.back_to_back[1] has 1 samples of forward, where others have 10",
    ),
    "an unknown phase": (
        make_run(),
        ("timing", "back_to_back", 1, "phase"),
        "sideways",
        "timing.back_to_back[1].phase 'sideways' is not known",
    ),
    "layers without end": (make_run(), ("spec", "model", "shape", "num_layers"), 10**9, "num_layers must be at most"),
    "a short column": (PROFILED, ("profile", "timeline", "stream"), [7], "profile.timeline.stream has 1 entries"),
    "a name out of the table": (PROFILED, ("profile", "timeline", "kernel", 0), 10**6, "timeline.kernel[0] is number"),
    "an unknown category": (
        PROFILED,
        ("profile", "kernels", 0, "category"),
        "magic",
        "profile.kernels[0].category 'magic' is not known",
    ),
    "no steps": (PROFILED, ("profile", "num_steps"), 0, "profile.num_steps must be at least 1"),
    "memory of nobody": (WATCHED, ("memory_profile", "at_peak"), {"magic": 1}, "at_peak 'magic' is not known"),
    "a peak that is no sum": (WATCHED, ("memory_profile", "peak_bytes"), 1, "memory_profile.at_peak sums to"),
    "a short curve": (WATCHED, ("memory_profile", "timeline", "allocated_bytes", 0), [1], "allocated_bytes[0] has 1"),
    "an empty curve": (WATCHED, ("memory_profile", "timeline", "time_s"), [], "timeline.time_s is empty"),
    "an unknown pass": (ATTENTION, ("cells", 0, "passes", 0, "phase"), "up", "cells[0].passes[0].phase 'up'"),
    "a rank twice": (COMM, ("cells", 0, "ranks", 1, "rank"), 0, "cells[0].ranks must be ranks 0 to"),
    "a cell of nothing": (COMM, ("cells", 0, "ranks"), [], "cells[0].ranks is empty"),
    "an unknown collective": (DDP, ("cells", 1, "messages", 0, "collective"), "shout", "collective 'shout'"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_no_steplab_writes_is_refused_by_its_path(what: str) -> None:
    record, path, value, told = BAD[what]
    fields = json.loads(encode(record))
    at = fields
    for step in path[:-1]:
        at = at[step]
    assert path[-1] in at if isinstance(at, dict) else True
    at[path[-1]] = value
    with pytest.raises(SteplabError) as error:
        check(decode(json.dumps(fields)))
    assert str(error.value).startswith("record ")
    assert told in str(error.value)
    assert str(error.value).isprintable()
