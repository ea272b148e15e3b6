"""Work is bounded by what is worth reading: events, elements and instructions are counted, whatever the file says."""

import copy
import os
import pickle
from pathlib import Path

import pytest
from tests.fuzz import seeds

from steplab.errors import UserError
from steplab.limits import Limits
from steplab.snapshots.reading import read_snapshot
from steplab.traces.reading import read_trace
from steplab.unpacking import small_file

EVENT = '{"cat": "cpu_op", "name": "x", "ts": 1, "dur": 1}'
FRAME = b"\x95" + bytes(8)


@pytest.mark.parametrize(
    ("elements", "why"),
    [
        ("1," * 200, "more than 100 elements of its list are no events"),
        (f"{EVENT}," * 200, "more than 100 kernels, copies, calls, operators and ranges"),
        ("{}," * 200, "more than 100 events of kinds that are not read"),
        ('{"cat": "python_function", "ts": 1, "dur": 1},' * 200, "more than 100 events of kinds that are not read"),
    ],
)
def test_a_trace_of_more_than_is_worth_reading_is_refused(elements: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(f'{{"traceEvents": [{elements} {EVENT}]}}')
    few = Limits(num_unreadable=100, num_events=100, num_skipped=100)
    with pytest.raises(UserError) as error:
        read_trace(path, limits=few, chunk_bytes=500)
    assert str(error.value).startswith(f"{path}: ")
    assert why in str(error.value)
    assert "--raise-limits 4" in str(error.value)
    assert read_trace(path, limits=few.times(3), chunk_bytes=500).ops.name.size


@pytest.mark.parametrize("block", [b"N0", b"(1", FRAME, b"]0", b"K\x010"])
def test_a_pickle_that_only_takes_time_is_refused(block: bytes, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x04" + block * 2000 + pickle.dumps(seeds.snapshot(), 4)[2:])
    with pytest.raises(UserError, match=r"its pickle has more than 1,000 instructions.*--raise-limits"):
        read_snapshot(path, limits=Limits(num_instructions=1000))
    assert read_snapshot(path, limits=Limits(num_instructions=1000).times(50)).devices


def test_stacks_of_more_frames_than_the_limits_allow_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    whole = copy.deepcopy(seeds.snapshot())
    for line, event in enumerate(whole["device_traces"][0]):
        event["frames"] = [{"filename": "train.py", "line": line, "name": "f"}]
    path.write_bytes(pickle.dumps(whole, 4))
    with pytest.raises(UserError, match="its stacks have more than 3 frames"):
        read_snapshot(path, limits=Limits(num_frames=3))


def test_a_file_without_an_end_is_no_study_and_no_configuration(tmp_path: Path) -> None:
    huge = tmp_path / "study.toml"
    with huge.open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)  # a hole, which takes no disk
    for path in (huge, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"it has more than 64\.0 MiB"):
            small_file(path)
    with pytest.raises(OSError, match="null"):
        small_file(Path("a\0b"))
