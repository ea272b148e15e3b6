import dataclasses

import pytest
from tests.ddp_records import make_ddp_run
from tests.rendering import run_text
from tests.runs import make_run

from steplab.records.ddp import DdpCell
from steplab.records.timing import PhaseSamples, Timing, lead_s, waits_for_host
from steplab.report.ddp.document import ddp_verdict
from steplab.report.ddp.figures import ddp_rows


def phases(forward_s: float, backward_s: float) -> tuple[PhaseSamples, ...]:
    least = min(forward_s, backward_s)
    return (
        PhaseSamples(phase="forward", device_s=(0.5, 0.5), lead_s=(forward_s, forward_s)),
        PhaseSamples(phase="backward", device_s=(0.5, 0.5), lead_s=(backward_s, backward_s)),
        PhaseSamples(phase="step", device_s=(1.0, 1.0), lead_s=(least, least)),
    )


@pytest.mark.parametrize(
    ("leads", "waits"), [((0.5, 0.4), False), ((0.011, 0.011), False), ((0.4, 0.009), True), ((0.001, 0.002), True)]
)
def test_a_lead_below_a_hundredth_of_the_step_is_told(leads: tuple[float, float], waits: bool) -> None:
    assert waits_for_host(phases(*leads)) == waits


def test_where_no_lead_was_taken_nothing_is_said_and_no_column_is_shown() -> None:
    run = make_run()
    assert run.timing is not None
    assert lead_s(run.timing.back_to_back) is None
    assert not waits_for_host(run.timing.back_to_back)
    assert "host ahead" not in run_text(run, width=160)


def test_a_run_shows_the_lead_of_each_phase_and_says_that_it_waits() -> None:
    run = dataclasses.replace(make_run(), timing=Timing(warmup=(), back_to_back=phases(0.25, 0.002)))
    shown = run_text(run, width=160)
    rows = {line.split()[0]: line for line in shown.splitlines() if line.split()}
    assert "250 ms" in rows["forward"]
    assert "2.00 ms" in rows["backward"]
    assert shown.count("GPU may wait for Python") == 1
    assert "To see why it waits: steplab profile" in shown
    assert "GPU may wait for Python" not in run_text(
        dataclasses.replace(run, timing=Timing(warmup=(), back_to_back=phases(0.25, 0.2))), width=160
    )


def test_a_study_names_the_contenders_that_wait_for_python_on_some_rank() -> None:
    run = make_ddp_run()
    late = next(cell for cell in run.cells if cell.contender.kind == "bucketed")

    def with_leads(cell: DdpCell) -> DdpCell:
        last = len(cell.ranks) - 1
        ranks = tuple(
            dataclasses.replace(rank, phases=phases(0.3, 0.004 if cell is late and rank.rank == last else 0.2))
            for rank in cell.ranks
        )
        return dataclasses.replace(cell, ranks=ranks)

    measured = dataclasses.replace(run, cells=tuple(map(with_leads, run.cells)))
    said = [sentence for sentence in ddp_verdict(measured).cautions if "may wait for Python" in sentence]
    assert said == [
        f"Warning: the GPU may wait for Python, which is less than 1 % of a step ahead: {late.contender.label}. "
        "Exposed communication there may include these waits."
    ]
    found = {row["variant"]: row["host_lead_s"] for row in ddp_rows(measured)}
    assert found[late.contender.label] == 0.004
    assert set(found.values()) == {0.2, 0.004}
    assert not [sentence for sentence in ddp_verdict(run).cautions if "may wait for Python" in sentence]
