import dataclasses
import statistics
from typing import Any

import pytest
from tests.runs import grid, make_run

from steplab.records.codec import decode, encode
from steplab.records.memory import AllocatorState
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.report.kit.table import sheet
from steplab.report.run.cells import cells_of
from steplab.report.run.effects import effect_bars, effects_table
from steplab.report.run.first_steps import first_steps_table

STUDY = grid({"model": ["small", "medium"], "precision": ["fp32", "bf16"], "compile": ["off", "default"]})


def by_id(run_id: object) -> Run:
    return next(run for run in STUDY if run.id == run_id)


def samples_of(run: Run, part: str) -> tuple[float, ...]:
    assert run.timing
    found = run.timing.phase(part)
    assert found
    return found.best_s


# --- choices ----------------------------------------------------------------------------------------------


def test_each_choice_is_set_against_its_baseline_at_every_size() -> None:
    rows = effects_table(cells_of(STUDY)).rows
    fields = {"bf16 instead of fp32": "precision", "compiled instead of eager": "compile"}
    assert list(dict.fromkeys(row["choice"] for row in rows)) == list(fields)
    for choice, field in fields.items():
        of_choice = [row for row in rows if row["choice"] == choice]
        assert len(of_choice) == len(STUDY) // 2
        for row in of_choice:
            before, after = map(by_id, str(row["ids"]).split())
            assert before.spec
            assert after.spec
            changed = {field: getattr(after.spec, field)}
            assert dataclasses.replace(before.spec, **changed) == after.spec
            medians = [statistics.median(samples_of(run, "step")) for run in (before, after)]
            assert [row["before_s"], row["after_s"]] == medians
            assert row["ratio"] == pytest.approx(medians[0] / medians[1])
            peaks = [run.memory.peak("step") for run in (before, after) if run.memory]
            sizes = [peak.peak_allocated_bytes for peak in peaks if peak]
            assert row["bytes_ratio"] == pytest.approx(sizes[1] / sizes[0])


def test_bars_are_what_choices_save_the_largest_first_and_losses_go_to_the_left() -> None:
    def timed(fields: dict[str, object], step_s: float) -> Run:
        samples = PhaseSamples(phase="step", host_s=(step_s, 1.001 * step_s, 0.999 * step_s) * 3)
        return make_run(fields, timing=Timing(warmup=(), back_to_back=(samples,)))

    runs = [timed({}, 0.1), timed({"precision": "bf16"}, 0.125), timed({"compile": "default"}, 0.05)]
    bars = effect_bars(cells_of(runs))
    assert bars
    assert [(bar.label, bar.figure) for bar in bars.bars] == [
        ("compiled instead of eager", "50.0 % less time"),
        ("bf16 instead of fp32", "25.0 % more time"),
    ]
    assert [bar.segments[0].value for bar in bars.bars] == pytest.approx([0.5, -0.25])
    assert [bars.low, bars.width] == pytest.approx([-0.25, 0.75])


def test_choices_with_one_pair_share_a_table() -> None:
    runs = [make_run(), *(make_run({"attention": name}) for name in ("sdpa", "sdpa_flash"))]
    told = [str(row["choice"]) for row in effects_table(cells_of(runs)).rows]
    assert told == ["sdpa attention instead of plain attention", "sdpa_flash attention instead of plain attention"]


def test_the_rows_of_a_choice_are_in_the_order_of_sizes() -> None:
    rows = effects_table(cells_of(STUDY[::-1])).rows
    assert ["small" in str(row["run"]) for row in rows] == [True, True, False, False] * 2


# --- first steps ------------------------------------------------------------------------------------------


def phase(name: str, *seconds: float) -> PhaseSamples:
    return PhaseSamples(phase=name, device_s=seconds)


WARMED = Timing(
    warmup=(
        phase("forward", 5.0, 1.1),
        phase("backward", 2.2, 2.0),
        phase("optimizer", 0.9, 0.1),
        phase("step", 8.1, 3.2),
    ),
    back_to_back=(
        phase("forward", *[1.0] * 6),
        phase("backward", *[2.0] * 6),
        phase("optimizer", *[0.1] * 6),
        phase("step", *[3.1] * 6),
    ),
)
STATES = tuple(
    AllocatorState(allocated_bytes=allocated, reserved_bytes=reserved, num_device_allocations=calls)
    for allocated, reserved, calls in ((100, 1000, 3), (300, 5000, 10), (300, 5500, 11))
)


def warmed(**changes: Any) -> Run:
    run = make_run(timing=WARMED)
    assert run.memory
    assert run.environment
    device = dataclasses.replace(run.environment.device, idle_sm_clock_hz=345e6)
    return dataclasses.replace(
        run,
        memory=dataclasses.replace(run.memory, during_warmup=STATES),
        environment=dataclasses.replace(run.environment, device=device),
        **changes,
    )


def test_the_excess_of_the_first_step_is_told_by_phase_with_what_the_allocator_took() -> None:
    table = first_steps_table(cells_of([warmed()]))
    assert table
    (row,) = table.rows
    assert (row["first_s"], row["settled_s"]) == (8.1, 3.1)
    assert row["forward"] == 4.0
    assert row["backward"] == pytest.approx(0.2)
    assert row["optimizer"] == pytest.approx(0.8)
    assert (row["first_growth_bytes"], row["later_growth_bytes"], row["state_bytes"]) == (4000, 500, 200)


def test_what_a_compiling_step_did_before_the_first_is_said_where_there_is_one() -> None:
    def below(timing: Timing) -> str:
        return sheet(first_steps_table(cells_of([dataclasses.replace(warmed(), timing=timing)]))).below

    assert "the step that compiles" not in below(WARMED)
    assert (
        "optimizer's state. A compiled run did some of this in the step that compiles, before its first step here."
        in below(dataclasses.replace(WARMED, first_step_s=20.0))
    )


def test_states_of_the_allocator_are_part_of_the_record() -> None:
    assert decode(encode(warmed())) == warmed()
