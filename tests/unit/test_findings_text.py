import dataclasses

import msgspec
import pytest
from tests.unit.explaining import op, own, profile, timing

from steplab.explain.api import explain, not_looked_at
from steplab.records.finding import Evidence, Findings, Trial
from steplab.records.profile import CompiledShares
from steplab.records.run import Run
from steplab.report.kit.document import Pairs
from steplab.report.kit.rendering import render
from steplab.report.profile.verdict import findings_document, saving_facts

CHAIN = [
    op("aten::silu", "elementwise", 3.0, where="blocks.*.feed_forward", calls=12),
    op("aten::mul", "elementwise", 4.0, where="blocks.*.feed_forward", calls=12),
    op("aten::mm", "matmul", 20.0, dtype="bf16", calls=60),
]


def render_findings(run: Run, findings: Findings, format: str, *, width: int | None = None, color: bool = False) -> str:
    return render(findings_document(run, findings), format, width=width, color=color)


@pytest.fixture
def run() -> Run:
    shares = CompiledShares(memory_bound=4 / 7, products=1.0, kernels=1.0, host=1.0)  # 3 ms of 7 are saved
    seen = profile(CHAIN, compiled=shares)
    return own({"model": "small", "precision": "bf16"}, seen, timing(30.0, optimizer=1.0))


@pytest.fixture
def found(run: Run) -> Findings:
    return Findings(
        run_id=run.id,
        created_utc="2026-11-21T09:00:00Z",
        steplab_version="0.1.0",
        step_s=0.03,
        findings=tuple(explain(run)),
        not_looked_at=not_looked_at(run),
    )


def test_a_page_begins_with_the_largest_saving_as_a_share_of_its_step(found: Findings) -> None:
    (fact,) = saving_facts(found)
    assert fact.figure == "10.0 %"
    assert fact.text == "largest predicted saving: --compile default"
    assert saving_facts(dataclasses.replace(found, findings=())) == []


def test_only_what_can_be_tried_is_offered_to_be_tried(run: Run, found: Findings) -> None:
    code = [dataclasses.replace(finding, fields={}) for finding in found.findings]
    for given in (found, dataclasses.replace(found, findings=tuple(code))):
        text = " ".join(render_findings(run, given, "table").split())
        assert ("`--try` measures the changes that are options of `steplab run`." in text) == (given is found)


def tried(found: Findings) -> Findings:
    trial = Trial(before_s=0.0305, after_s=0.0265, run_ids=("aaaaaaaaaaaa", "bbbbbbbbbbbb"))
    return dataclasses.replace(
        found, findings=tuple(dataclasses.replace(f, trial=trial if f.fields else None) for f in found.findings)
    )


@pytest.mark.parametrize("format", ["table", "md"])
def test_a_bound_is_not_told_as_an_estimate(run: Run, found: Findings, format: str) -> None:
    bound = dataclasses.replace(tried(found), findings=(dataclasses.replace(tried(found).findings[0], at_most=True),))
    text = " ".join(render_findings(run, bound, format, width=120).split())
    assert "saves a measured 4.00 ms of 30.0 ms per step, 13.3 %" in text
    assert "where at most 3.00 ms were predicted" in text
    untried = dataclasses.replace(bound, findings=(dataclasses.replace(bound.findings[0], trial=None),))
    assert "saves at most 3.00 ms of 30.0 ms per step, 10.0 %" in render_findings(run, untried, format, width=120)
    assert "saves about" not in text
    little = dataclasses.replace(bound.findings[0], saves_s=1e-4, trial=None)
    assert "No change saves 1 % of the step." in render_findings(
        run, dataclasses.replace(bound, findings=(little,)), format, width=120
    )
    assert msgspec.json.decode(render_findings(run, bound, "json"))[0]["at_most"] is True


def test_a_larger_batch_saves_time_for_the_same_tokens_and_none_per_step(run: Run, found: Findings) -> None:
    larger = dataclasses.replace(found.findings[0], fields={"batch": "8"}, tokens_ratio=2)
    text = " ".join(render_findings(run, dataclasses.replace(found, findings=(larger,)), "table", width=300).split())
    assert "--batch 8 saves about 3.00 ms for the same tokens, 10.0 % of 30.0 ms." in text
    assert "The change saves about 3.00 ms for the same tokens, 10.0 % of 30.0 ms." in text
    assert "30.0 ms per step" not in text
    assert "Each is capped by the time that those above leave, not counting a larger batch." in text
    assert "larger batch" not in render_findings(run, found, "table", width=300)


def test_trials_end_in_a_table(run: Run, found: Findings) -> None:
    text = render_findings(run, tried(found), "table", width=120)
    assert "Time saved per step, predicted and measured" in text
    [row] = [line for line in text.splitlines() if "compile=default" in line]
    assert "3.00 ms" in row
    assert "4.00 ms" in row
    assert "-3.3 %" in row  # of the step: (3.0 - 4.0) / 30.5
    assert "Tried: 30.5 ms became 26.5 ms, saving 4.00 ms where 3.00 ms were predicted" in text
    assert "compile=default" not in render_findings(run, found, "table", width=120)


@pytest.mark.parametrize("width", [50, 60, 80])
def test_a_narrow_table_of_trials_breaks_no_figure(run: Run, found: Findings, width: int) -> None:
    text = render_findings(run, tried(found), "table", width=width)
    table = text[text.index("Time saved per step, predicted and measured") :]
    assert "3.00 ms" in table
    assert "4.00 ms" in table
    assert max(map(len, table.splitlines())) <= width


@pytest.mark.parametrize(("step_s", "told"), [(0.0305, False), (0.0260, False), (0.0250, True), (0.0400, True)])
@pytest.mark.parametrize("format", ["table", "md"])
def test_a_step_that_is_no_longer_the_recorded_one_is_noted(
    run: Run, found: Findings, step_s: float, told: bool, format: str
) -> None:
    now = dataclasses.replace(tried(found), step_s=step_s)
    text = " ".join(render_findings(run, now, format, width=120).split())
    assert ("The unchanged step took 30.5 ms now" in text) == told


def test_rows_have_a_finding_each(run: Run, found: Findings) -> None:
    (row,) = msgspec.json.decode(render_findings(run, tried(found), "json"))
    assert (row["kind"], row["saves_s"]) == ("fusable_elementwise", pytest.approx(0.003))
    assert (row["before_s"], row["saved_s"]) == (0.0305, pytest.approx(0.004))
    head, line = render_findings(run, tried(found), "csv").splitlines()
    assert head.split(",") == list(row)
    assert line.startswith("fusable_elementwise,")


@pytest.mark.parametrize("format", ["table", "md"])
def test_a_run_with_nothing_to_mend_says_so(run: Run, found: Findings, format: str) -> None:
    nothing = dataclasses.replace(found, findings=(), not_looked_at=())
    told = "No change is predicted to save a considerable share of the step"
    assert f"{told}." in render_findings(run, nothing, format, width=80)
    text = " ".join(render_findings(dataclasses.replace(run, profile=None), nothing, format, width=80).split())
    assert f"{told}, by the few diagnoses that need no profile." in text


def test_names_from_a_trace_steer_no_terminal_and_break_no_table(run: Run, found: Findings) -> None:
    bad = "\x1b[2Jname | with\x07 <b>pipes</b>"
    first = found.findings[0]
    spoiled = dataclasses.replace(
        found, findings=(dataclasses.replace(first, saw=bad, evidence=(Evidence(what=bad, value=1.0, unit=""),)),)
    )
    assert "\x1b" not in render_findings(run, spoiled, "table", width=80)
    lines = [line for line in render_findings(run, spoiled, "md").splitlines() if "pipes" in line]
    assert lines
    assert all("<b>" not in line and "\x1b" not in line for line in lines)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0012, "s", "1.20 ms"),
        (3 * 1024**3, "B", "3.00 GiB"),
        (12.0, "%", "12.0 %"),
        (5e14, "FLOP/s", "500 TFLOP/s"),
        (330.0, "", "330"),
        (0.5, "", "0.500"),
    ],
)
def test_figures_carry_their_unit(run: Run, found: Findings, value: float, unit: str, text: str) -> None:
    evidence = (Evidence(what="it", value=value, unit=unit),)
    one = dataclasses.replace(found, findings=(dataclasses.replace(found.findings[0], evidence=evidence),))
    (pairs,) = [block for block in findings_document(run, one).sections[0].blocks if isinstance(block, Pairs)]
    assert pairs.pairs[1:] == (("it", text),)


def test_without_findings_the_answer_says_where_the_time_goes(run: Run, found: Findings) -> None:
    text = " ".join(render_findings(run, dataclasses.replace(found, findings=()), "table", width=200).split())
    assert "No change is predicted to save a considerable share of the step. Under the profiler a step takes" in text
    assert "Busy time: matmul 74.1 %, elementwise 25.9 %." in text
    timed = dataclasses.replace(run, profile=None)
    assert "Busy time:" not in render_findings(timed, dataclasses.replace(found, findings=()), "table")
