import dataclasses
import gzip
import itertools
import json
import lzma
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.profiles import cpu_run, imported_run, launch_bound_run
from tests.runs import make_run, out_of_memory, recorder_run
from tests.unit.memory_records import imported_snapshot, watched_run

from steplab.errors import SteplabError
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.codec import decode, encode, new_id, now_utc
from steplab.records.comparison import ComparedFigure, Comparison, Ratio, Side
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.failure import Failure
from steplab.records.memory import Memory, PeakMemory
from steplab.records.record import Record
from steplab.records.rows import run_row
from steplab.records.run import ModelFacts, Run, Utilization
from steplab.records.timing import PhaseSamples, Timing, curve
from steplab.records.validation import check
from steplab.specs.model import ModelSpec
from steplab.specs.resolve import resolve_step
from steplab.specs.step import FIELDS

TEXT = st.text(max_size=12)
COUNT = st.integers(0, 2**63 - 1)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.lists(st.floats(1e-9, 1e6), max_size=5).map(tuple)
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | COUNT | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


UNIT = st.sampled_from(["FLOP/s", "B/s"])


def maybe(strategy: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.none() | strategy


def several(strategy: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.lists(strategy, max_size=2).map(tuple)


PHASES = several(st.builds(PhaseSamples, phase=TEXT, device_s=maybe(SECONDS), host_s=maybe(SECONDS)))
ENVIRONMENTS = st.builds(
    Environment,
    device=st.builds(
        DeviceInfo, kind=TEXT, name=TEXT, memory_bytes=maybe(COUNT), sm_clock_hz=maybe(NUMBER), threads=maybe(COUNT)
    ),
    host=TEXT,
    cpu=TEXT,
    num_cpus=COUNT,
    python=TEXT,
    torch=TEXT,
    driver=maybe(TEXT),
    variables=st.dictionaries(TEXT, TEXT, max_size=2),
    gaps=several(TEXT),
)
HF_MODELS = st.builds(
    ModelSpec,
    name=TEXT,
    kind=st.just("hf"),
    hf_config=st.dictionaries(TEXT.filter(lambda key: "position" not in key), JSON_VALUE, max_size=3),
)
SPECS = st.sampled_from([resolve_step({}), resolve_step({"model": "2.7b", "pass": "forward", "seed": 7})]) | st.builds(
    lambda model: dataclasses.replace(resolve_step({}), model=model), HF_MODELS
)
RUNS = st.builds(
    Run,
    id=TEXT,
    created_utc=TEXT,
    steplab_version=TEXT,
    name=TEXT,
    study=maybe(TEXT),
    spec=maybe(SPECS),
    tokens_per_step=maybe(COUNT),
    environment=maybe(ENVIRONMENTS),
    model=maybe(st.builds(ModelFacts, num_parameters=COUNT, num_layers=maybe(COUNT))),
    timing=maybe(
        st.builds(
            Timing,
            warmup=PHASES,
            back_to_back=PHASES,
            synchronised=PHASES,
            back_to_back_host_s=maybe(NUMBER),
            first_step_s=maybe(NUMBER),
        )
    ),
    memory=maybe(
        st.builds(
            Memory,
            peaks=several(st.builds(PeakMemory, phase=TEXT, peak_allocated_bytes=COUNT, peak_reserved_bytes=COUNT)),
            total_bytes=maybe(COUNT),
            host_peak_bytes=maybe(COUNT),
        )
    ),
    utilizations=several(
        st.builds(
            Utilization,
            kind=st.sampled_from(["mfu", "hfu"]),
            convention=TEXT,
            flops=NUMBER,
            dtype=TEXT,
            peak_flops_per_s=maybe(NUMBER),
            peak_source=TEXT,
            value=maybe(NUMBER),
        )
    ),
    failure=maybe(
        st.builds(
            Failure,
            kind=st.sampled_from(["out_of_memory", "crashed", "timeout", "error"]),
            message=TEXT,
            requested_bytes=maybe(COUNT),
            last_lines=several(TEXT),
        )
    ),
    notes=several(TEXT),
)
CEILINGS = st.builds(
    Ceilings,
    id=TEXT,
    created_utc=TEXT,
    steplab_version=TEXT,
    environment=ENVIRONMENTS,
    ceilings=several(
        st.builds(Ceiling, name=TEXT, dtype=maybe(TEXT), unit=UNIT, work=NUMBER, seconds=SECONDS.filter(bool))
    ),
)
REAL = [make_run(), make_run({"pass": "forward", "compile": "default"}), out_of_memory(), recorder_run()]


# --- JSON -------------------------------------------------------------------------------------------------


@given(RUNS | CEILINGS)
def test_a_record_comes_back_from_json_as_it_was(record: Run | Ceilings) -> None:
    line = encode(record)
    assert b"\n" not in line
    assert decode(line) == record
    assert decode(line.decode()) == record
    assert json.loads(line) == json.loads(json.dumps(dataclasses.asdict(record)))


@given(RUNS | CEILINGS, JSON_VALUE)
def test_fields_of_a_later_version_are_ignored(record: Run | Ceilings, value: object) -> None:
    assert decode(json.dumps(with_extra_fields(json.loads(encode(record)), value))) == record


def with_extra_fields(value: Any, extra: object) -> Any:
    if isinstance(value, list):
        return [with_extra_fields(item, extra) for item in value]
    if not isinstance(value, dict):
        return value
    free = ("variables", "hf_config")
    known = {key: inner if key in free else with_extra_fields(inner, extra) for key, inner in value.items()}
    return known | {"field_of_the_future": extra}


def test_fields_that_an_earlier_version_did_not_write_take_their_defaults() -> None:
    line = json.dumps({"schema": "steplab.run/1", "id": "a", "created_utc": "b", "steplab_version": "0.0.1"})
    assert decode(line) == Run(id="a", created_utc="b", steplab_version="0.0.1")


@pytest.mark.parametrize("kind", ["run", "ceilings", "attention", "comm"])
def test_a_newer_major_format_is_refused_with_the_fix(kind: str) -> None:
    with pytest.raises(SteplabError, match=rf"steplab\.{kind}/2.*upgrade steplab"):
        decode(json.dumps({"schema": f"steplab.{kind}/2", "id": "a"}))


@pytest.mark.parametrize(
    "schema", ["steplab.run/0", "steplab.run", "steplab.run/new", "steplab.run/²", "steplab.\x1b[2J/1", "other/1", ""]
)
def test_a_format_of_nobody_is_refused_by_name(schema: str) -> None:
    with pytest.raises(SteplabError, match="is not a record format") as error:
        decode(json.dumps({"schema": schema}))
    assert ascii(schema) in str(error.value)


def test_a_format_of_absurd_length_is_refused() -> None:
    with pytest.raises(SteplabError, match="is not a record format") as error:
        decode(json.dumps({"schema": "steplab.run/" + "9" * 5000}))
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "text",
    ["", "not json", "{", "[]", "null", "{}", '{"schema": 1}', b"\xff\xfe", b'{"schema": "\xff"}',
     '{"schema": "steplab.run/1"}', '{"schema": "steplab.run/1", "id": 3}', encode(make_run())[:-5],
     encode(make_run()).replace(b'"train"', b'"sideways"'), encode(make_run()).replace(b'"batch":4', b'"batch":0')],
)  # fmt: skip
def test_what_is_no_record_is_refused_as_such(text: bytes | str) -> None:
    with pytest.raises(SteplabError):
        decode(text)


def test_identities_are_twelve_hexadecimal_digits_and_times_are_utc() -> None:
    ids = {new_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(len(one) == 12 and set(one) <= set("0123456789abcdef") for one in ids)
    assert now_utc().endswith("Z")
    assert len(now_utc()) == len("2026-11-21T07:30:00Z")


# --- samples ----------------------------------------------------------------------------------------------


def test_the_devices_own_samples_come_before_the_hosts() -> None:
    assert PhaseSamples(phase="step", device_s=(1.0,), host_s=(2.0,)).best_s == (1.0,)
    assert PhaseSamples(phase="step", host_s=(2.0,)).best_s == (2.0,)
    assert PhaseSamples(phase="step").best_s == ()


def test_the_curve_begins_with_the_warm_up() -> None:
    timing = Timing(
        warmup=(PhaseSamples(phase="step", host_s=(3.0, 2.0)),),
        back_to_back=(PhaseSamples(phase="forward", host_s=(9.0,)), PhaseSamples(phase="step", host_s=(1.0,))),
    )
    assert curve(timing) == (3.0, 2.0, 1.0)
    assert curve(Timing(warmup=(), back_to_back=())) == ()


def test_a_ceiling_is_the_rate_of_the_fastest_repeat() -> None:
    assert Ceiling(name="matmul", dtype="fp32", unit="FLOP/s", work=12.0, seconds=(4.0, 3.0, 6.0)).best_per_s == 4.0


# --- rows -------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=9), st.lists(st.floats(1e-9, 1e6), min_size=1))
def test_times_in_a_row_are_the_medians_of_the_samples(step: list[float], forward: list[float]) -> None:
    phases = (
        PhaseSamples(phase="step", host_s=tuple(step)),
        PhaseSamples(phase="forward", device_s=tuple(forward), host_s=(0.0,)),
        PhaseSamples(phase="pipeline", host_s=tuple(forward)),
        PhaseSamples(phase="gradient sync", host_s=tuple(step)),
    )
    row = run_row(recorder_run(timing=Timing(warmup=phases, back_to_back=phases), tokens_per_step=512))
    assert row["step_time_s"] == statistics.median(step)
    assert row["forward_s"] == statistics.median(forward)
    assert row["pipeline_s"] == statistics.median(forward)
    assert row["gradient_sync_s"] == statistics.median(step)
    assert row["tokens_per_s"] == 512 / statistics.median(step)
    assert row["backward_s"] is row["optimizer_s"] is row["compile_s"] is None


@pytest.mark.parametrize(
    ("left_out", "absent"),
    [
        (
            "timing",
            {
                *("step_time_s", "step_time_low_s", "step_time_high_s", "forward_s", "backward_s", "optimizer_s"),
                "tokens_per_s",
            },
        ),
        ("memory", {"peak_allocated_bytes", "peak_reserved_bytes", "host_peak_bytes"}),
        ("environment", {"device", "torch", "git_commit"}),
        ("tokens_per_step", {"tokens_per_s"}),
        (
            "spec",
            {*(field.column for field in FIELDS.values() if field.value(make_run().spec) is not None), "processes"},
        ),
    ],
)
def test_what_a_run_lacks_is_none_in_its_row(left_out: str, absent: set[str]) -> None:
    before = run_row(make_run())
    missing: dict[str, Any] = {left_out: None}
    after = run_row(make_run(**missing))
    assert {name for name in before if before[name] != after[name]} - {"kind"} == absent
    assert all(after[name] is None for name in absent)


def test_without_utilizations_a_row_says_none() -> None:
    row = run_row(make_run(utilizations=()))
    assert {row[name] for name in ("mfu", "mfu_convention", "hfu", "peak_flops_per_s", "peak_source")} == {None}


@given(RUNS)
def test_a_row_never_holds_a_zero_that_the_run_does_not(run: Run) -> None:
    row = run_row(run)
    assert row.keys() == run_row(make_run()).keys()
    for name, phase in (("step_time_s", "step"), ("forward_s", "forward"), ("backward_s", "backward")):
        samples = run.timing.phase(phase) if run.timing else None
        assert (row[name] is None) == (samples is None or not samples.best_s)
    step = run.memory.peak("step") if run.memory else None
    assert row["peak_allocated_bytes"] == (step.peak_allocated_bytes if step else None)
    assert row["failure"] == (run.failure.message if run.failure else None)
    assert row["status"] == (run.failure.kind if run.failure else "ok")


def test_every_kind_of_run_has_the_same_columns() -> None:
    columns = [list(run_row(run)) for run in REAL]
    assert all(a == b for a, b in itertools.pairwise(columns))


@pytest.mark.parametrize("pass_name", ["forward", "forward_backward", "train"])
def test_the_optimizer_is_named_only_where_it_runs(pass_name: str) -> None:
    row = run_row(make_run({"pass": pass_name}))
    assert row["optimizer"] == ("adamw_fused" if pass_name == "train" else None)


def test_compile_time_is_the_first_step_beyond_a_usual_one() -> None:
    timing = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", host_s=(2.0, 4.0)),), first_step_s=20.0)
    assert run_row(recorder_run(timing=timing))["compile_s"] == 20.0 - 3.0


def test_a_utilization_is_that_of_the_convention_asked_for() -> None:
    run = make_run()
    for convention in ("causal", "full", "params"):
        found = run.utilization("mfu", convention)
        assert found is not None
        assert (found.kind, found.convention) == ("mfu", convention)


def test_where_the_convention_is_unknown_the_rule_of_thumb_serves() -> None:
    run = make_run()
    params = tuple(u for u in run.utilizations if u.convention == "params")
    found = dataclasses.replace(run, utilizations=params).utilization("mfu", "causal")
    assert found == params[0]
    assert dataclasses.replace(run, utilizations=params).utilization("hfu", "as_executed") is None


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


def test_every_recorded_record_passes_and_all_kinds_but_ceilings_are_among_them() -> None:
    kinds = set()
    for record in itertools.chain.from_iterable(map(records_in, RECORDED)):
        check(record)
        kinds.add(record.schema)
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
        "timing.back_to_back[1].phase 'sideways' is unknown",
    ),
    "layers without end": (make_run(), ("spec", "model", "shape", "num_layers"), 10**9, "shape.num_layers"),
    "a short column": (PROFILED, ("profile", "timeline", "stream"), [7], "profile.timeline.stream has 1 entries"),
    "a name out of the table": (PROFILED, ("profile", "timeline", "kernel", 0), 10**6, "timeline.kernel[0] is number"),
    "an unknown category": (
        PROFILED,
        ("profile", "kernels", 0, "category"),
        "magic",
        r"Expected `str` matching regex '^(matmul|attention|",
    ),
    "no steps": (PROFILED, ("profile", "num_steps"), 0, "Expected `int` >= 1 - at `$.profile.num_steps`"),
    "memory of nobody": (
        WATCHED,
        ("memory_profile", "at_peak"),
        {"magic": 1},
        "at `key` in `$.memory_profile.at_peak",
    ),
    "a peak that is no sum": (WATCHED, ("memory_profile", "peak_bytes"), 1, "memory_profile.at_peak sums to"),
    "a short curve": (WATCHED, ("memory_profile", "timeline", "allocated_bytes", 0), [1], "allocated_bytes[0] has 1"),
    "an empty curve": (
        WATCHED,
        ("memory_profile", "timeline", "time_s"),
        [],
        "length >= 1 - at `$.memory_profile.timeline",
    ),
    "an unknown pass": (ATTENTION, ("cells", 0, "passes", 0, "phase"), "up", "cells[0].passes[0].phase 'up'"),
    "a rank twice": (COMM, ("cells", 0, "ranks", 1, "rank"), 0, "cells[0].ranks must be ranks 0 to"),
    "a cell of nothing": (COMM, ("cells", 0, "ranks"), [], "cells[0].ranks is empty"),
    "an unknown collective": (
        DDP,
        ("cells", 1, "messages", 0, "collective"),
        "shout",
        "at `$.cells[1].messages[0].collective`",
    ),
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
    assert str(error.value).startswith(("record ", "not a steplab record: "))
    assert told in str(error.value)
    assert str(error.value).isprintable()


def test_a_comparison_is_one_line_at_a_prompt() -> None:
    ratio = Ratio(
        a=2.0, b=3.0, num_a=9, num_b=9, ratio=1.5, low=1.4, high=1.6, p=1e-4, threshold=0.05, decision="higher"
    )
    figure = ComparedFigure(cell="", name="step time", group="time", unit="s", decides=True, a=2.0, b=3.0, ratio=ratio)
    found = Comparison(a=Side(told="old", ids=("a",)), b=Side(told="new", ids=("b",)), figures=(figure,))
    assert repr(found) == "<Comparison of new against old: regression, step time 1.500×>"
