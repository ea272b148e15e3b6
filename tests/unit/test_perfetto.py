import json
import random
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.profiles import cpu_run, imported_run, profiled_run
from tests.runs import make_run
from tests.sure import sure

from steplab.cli.app import main
from steplab.errors import UserError
from steplab.records.codec import encode
from steplab.records.profile import Timeline
from steplab.records.run import Run
from steplab.report.perfetto import Slice, chrome_trace, nested_lanes

LARGE, CPU, IMPORTED = profiled_run(), cpu_run(), imported_run()
RUNS = [LARGE, CPU, IMPORTED]
NAMES = ["large", "cpu", "imported"]


def timeline_of(run: Run) -> Timeline:
    assert run.profile is not None
    assert run.profile.timeline is not None
    return run.profile.timeline


def read(run: Run) -> dict[str, Any]:
    return dict(json.loads(chrome_trace(run), parse_float=Decimal))


def rows_of(trace: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    processes, threads = {}, {}
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(event)
    return rows


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_durations_are_those_of_the_record_to_the_nanosecond(run: Run) -> None:
    timeline = timeline_of(run)
    word = "thread" if run is CPU else "stream"
    rows = {name: row for (process, name), row in rows_of(read(run)).items() if process != "model"}
    assert set(rows) == {f"{word} {stream}" for stream in timeline.stream}
    columns = list(zip(timeline.kernel, timeline.stream, timeline.start_ns, timeline.duration_ns, strict=True))
    for name, row in rows.items():
        expected = [c for c in columns if f"{word} {c[1]}" == name]
        assert sum(Decimal(event["dur"]) for event in row) * 1000 == sum(c[3] for c in expected)
        assert [(event["name"], event["cat"], event["ts"] * 1000, event["dur"] * 1000) for event in row] == [
            (timeline.names[kernel], timeline.categories[kernel], start, lasts) for kernel, _, start, lasts in expected
        ]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_phases_and_ranges_have_rows_of_their_own(run: Run) -> None:
    timeline, rows = timeline_of(run), rows_of(read(run))
    phases = [(e["name"], e["ts"] * 1000, (e["ts"] + e["dur"]) * 1000) for e in rows["model", "phases"]]
    assert phases == list(timeline.phases)
    ranges = [e for (process, name), row in rows.items() if name.startswith("ranges") for e in row]
    found = sorted((e["name"], e["ts"] * 1000, (e["ts"] + e["dur"]) * 1000) for e in ranges)
    assert found == sorted((name, start, end) for name, start, end, _ in timeline.ranges)


def assert_nested(row: list[dict[str, Any]]) -> None:
    open_: list[Decimal] = []
    for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
        start, end = Decimal(event["ts"]), Decimal(event["ts"]) + Decimal(event["dur"])
        while open_ and open_[-1] <= start:
            open_.pop()
        assert not open_ or end <= open_[-1], f"{event['name']} overlaps the slice before it"
        open_.append(end)


@pytest.mark.parametrize("seed", range(10))
def test_slices_of_a_row_nest_or_follow_whatever_overlaps_in_the_record(seed: int) -> None:
    rng = random.Random(seed)
    starts = sorted(rng.randrange(2000) for _ in range(80))
    timeline = Timeline(
        names=("k",),
        categories=("matmul",),
        kernel=(0,) * 80,
        stream=tuple(rng.choice([-1, 0, 7]) for _ in starts),
        start_ns=tuple(starts),
        duration_ns=tuple(rng.choice([0, 1, 10, 300]) for _ in starts),
        phases=(("forward", 0, 900), ("backward", 900, 2300)),
        ranges=tuple(("r", start, start + rng.randrange(400), 0) for start in starts),
    )
    rows = rows_of(read(replace(LARGE, profile=replace(sure(LARGE.profile), timeline=timeline))))
    assert sum(map(len, rows.values())) == 80 + 2 + 80
    for row in rows.values():
        assert_nested(row)


def test_slices_that_nest_share_a_row() -> None:
    def piece(start_ns: int, end_ns: int) -> Slice:
        return Slice(name="", start_ns=start_ns, end_ns=end_ns, category="range")

    assert len(nested_lanes([piece(0, 10), piece(0, 4), piece(4, 10), piece(5, 5), piece(10, 12)])) == 1
    assert len(nested_lanes([piece(0, 10), piece(5, 11)])) == 2
    assert nested_lanes([]) == []


def test_rows_are_told_apart_by_their_numbers() -> None:
    trace = read(IMPORTED)
    named = [(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert len(named) == len(set(named)) >= 3
    assert all(isinstance(number, int) and number > 0 for pair in named for number in pair)
    assert trace["otherData"]["run"] == IMPORTED.id


def test_a_run_without_a_timeline_is_told_in_one_line() -> None:
    with pytest.raises(UserError, match="has no profile; `steplab profile` makes"):
        chrome_trace(make_run())
    with pytest.raises(UserError, match="has no timeline"):
        chrome_trace(replace(LARGE, profile=replace(sure(LARGE.profile), timeline=None)))


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> str:
    lines = b"\n".join(encode(run) for run in (IMPORTED, make_run()))
    (tmp_path / "runs.jsonl").write_bytes(lines)
    path = str(tmp_path / "store.db")
    assert main(["import", str(tmp_path / "runs.jsonl"), "--store", path]) == 0
    return path


def test_export_writes_the_timeline_of_one_run(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    target = tmp_path / "step.json"
    command = ["export", "--format", "perfetto", "--store", store]
    assert main([*command, IMPORTED.id, "--output", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == chrome_trace(IMPORTED)
    assert main([*command, IMPORTED.id[:6]]) == 0
    assert capsys.readouterr().out == chrome_trace(IMPORTED)


@pytest.mark.parametrize("named", ["none", "two", "unprofiled"])
def test_export_refuses_in_one_line_what_has_no_timeline(
    named: str, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = {"none": [], "two": [IMPORTED.id, make_run().id], "unprofiled": [make_run().id]}[named]
    capsys.readouterr()
    assert main(["export", "--format", "perfetto", "--store", store, *ids]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert ("has no profile" if named == "unprofiled" else "takes the id of one run") in said.err
