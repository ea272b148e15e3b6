import dataclasses
from pathlib import Path

import pytest
from tests.runs import ENVIRONMENT, make_run, out_of_memory
from tests.stored_lines import fill
from tests.sure import sure
from tests.unit.explaining import foreign, op, own, profile, timing
from tests.unit.memory_records import imported_snapshot
from tests.unit.taking import FakeSession

from steplab.errors import SteplabError, Unsupported, UserError
from steplab.lab.explaining import explain, run_to_explain
from steplab.lab.turns import try_findings
from steplab.records.finding import Evidence, Finding, Findings
from steplab.records.run import Run
from steplab.report.kit.table import sheet
from steplab.report.profile.verdict import trials_table
from steplab.specs.resolve import with_fields
from steplab.specs.step import StepSpec
from steplab.store.database import Store

SEEN = profile([op("aten::mm", "matmul", 10.0, dtype="fp32", flops=5e11, moved=1e9)])
RUN = own({"model": "small"}, SEEN, timing(11.0))


def finding(kind: str, saves_s: float | None = 0.004, **fields: str) -> Finding:
    return Finding(
        kind=kind,
        title=kind,
        saw="saw",
        why="why",
        change="change",
        evidence=(Evidence(what="step", value=1.0, unit="s"),),
        saves_s=saves_s,
        prediction="so",
        fields=fields,
    )


def findings(*found: Finding) -> Findings:
    return Findings(
        run_id=RUN.id, created_utc="2026-11-21T09:00:00Z", steplab_version="0.1.0", step_s=0.011, findings=found
    )


def bench(**outcomes: float | str | Exception) -> FakeSession:
    def told(spec: StepSpec) -> float | str | Exception:
        what = next((k for k in outcomes if k in (spec.compile, spec.attention, f"batch_{spec.batch}")), "base")
        return outcomes[what]

    return FakeSession(told)


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPLAB_STORE", str(tmp_path / "tried.db"))


# --- trials -----------------------------------------------------------------------------------------------


def test_each_change_is_measured_against_the_step_measured_again(tmp_path: Path) -> None:
    taking = bench(base=0.012, default=0.009)
    told: list[str] = []
    first, second = finding("fusable_elementwise", compile="default"), finding("communication_exposed")
    tried = try_findings(RUN, findings(first, second), on_trial=told.append, session=taking)
    assert [each.kind for each in tried.findings] == ["communication_exposed", "fusable_elementwise"], "4 ms, then 3"
    trial = sure(tried.findings[1].trial)
    assert trial.before_s == pytest.approx(0.012)
    assert trial.after_s == pytest.approx(0.009)
    assert trial.saved_s == pytest.approx(0.003)
    assert (trial.least_saved_s, trial.most_saved_s) == pytest.approx((0.003, 0.003), rel=0.01)
    assert {spec.steps for spec in taking.asked} == {30}
    with Store.open(tmp_path / "tried.db", write=False) as opened:
        names = {row["id"]: row["name"] for row in opened.rows()}
    assert names == dict.fromkeys(trial.run_ids, f"trying {RUN.id}")
    assert tried.findings[0].trial is None  # no field does it
    assert [spec.compile for spec in taking.asked] == ["off", "default"]
    assert told == ["the unchanged step", "compile default"]


def test_one_change_proposed_twice_is_measured_once() -> None:
    taking = bench(base=0.012, default=0.009)
    found = findings(finding("a", compile="default"), finding("b", compile="default"))
    tried = try_findings(RUN, found, session=taking)
    assert len(taking.asked) == 2
    assert tried.findings[0].trial == tried.findings[1].trial


def test_a_larger_batch_is_compared_by_the_token() -> None:
    tried = try_findings(
        RUN, findings(finding("batch_too_small", batch="16")), session=bench(base=0.012, batch_16=0.03)
    )
    trial = sure(tried.findings[0].trial)
    assert trial.tokens_ratio == 4
    assert trial.saved_s == pytest.approx(0.012 - 0.03 / 4)


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ("asked 8.00 GiB", "out of memory: asked 8.00 GiB"),
        ("out of memory: asked 8.00 GiB", "out of memory: asked 8.00 GiB"),
        (Unsupported("sdpa", "no kernel", "use plain"), "sdpa is not supported: no kernel; use plain"),
    ],
)
def test_a_change_that_fails_is_said_and_the_others_are_tried(outcome: str | Exception, why: str) -> None:
    taking = bench(base=0.012, sdpa=outcome, default=0.009)
    found = findings(finding("a", attention="sdpa"), finding("b", compile="default"))
    tried = try_findings(RUN, found, session=taking)
    first, second = (f.trial for f in tried.findings)
    assert first is not None
    assert second is not None
    assert (first.after_s, first.saved_s, first.failure) == (None, None, why)
    assert second.after_s is not None


def test_a_step_that_no_longer_runs_cannot_be_compared_with() -> None:
    with pytest.raises(SteplabError, match=f"run {RUN.id} did not run again: out of memory: asked 8 GiB"):
        try_findings(RUN, findings(finding("a", compile="default")), session=bench(base="asked 8 GiB"))


@pytest.mark.parametrize(
    ("run", "what"), [(foreign(SEEN), "an imported trace"), (imported_snapshot(), "an imported snapshot")]
)
def test_what_is_from_elsewhere_cannot_be_run_again(run: Run, what: str) -> None:
    with pytest.raises(UserError, match=f"is {what}, which steplab cannot run again"):
        try_findings(run, findings(finding("a", compile="default")), session=bench())


def test_another_device_says_nothing_of_the_first() -> None:
    elsewhere = dataclasses.replace(ENVIRONMENT, device=dataclasses.replace(ENVIRONMENT.device, name="NVIDIA L4"))
    run = dataclasses.replace(RUN, environment=elsewhere)
    with pytest.raises(SteplabError, match="measured on NVIDIA L4, but this machine has NVIDIA H200"):
        try_findings(run, findings(finding("a", compile="default")), session=bench(base=0.012))


def test_auto_means_the_kind_of_device_it_meant_then() -> None:
    taking = bench(base=0.012, default=0.009)
    assert sure(RUN.spec).device == "auto"
    try_findings(RUN, findings(finding("a", compile="default")), session=taking)
    assert {spec.device for spec in taking.asked} == {"cuda"}


def test_nothing_to_try_measures_nothing() -> None:
    taking = bench(base=0.012)
    assert try_findings(RUN, findings(finding("a")), session=taking) == findings(finding("a"))
    assert taking.asked == []


def test_fields_change_the_spec_and_nothing_else() -> None:
    assert RUN.spec is not None
    changed = with_fields(RUN.spec, {"model.vocab_size": "10048", "batch": "8", "precision": "tf32"})
    assert (sure(changed.model.shape).vocab_size, changed.batch, changed.precision) == (10048, 8, "tf32")
    back = with_fields(changed, {"model.vocab_size": "10000", "batch": "4", "precision": "fp32"})
    assert back == RUN.spec
    with pytest.raises(UserError, match="precision 'fp7'"):
        with_fields(RUN.spec, {"precision": "fp7"})


# --- the store --------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    runs = [
        dataclasses.replace(RUN, id="aaaa00000000", created_utc="2026-11-21T07:00:00Z"),
        dataclasses.replace(RUN, id="bbbb00000000", created_utc="2026-11-21T08:00:00Z"),
        make_run({"model": "small"}, id="cccc00000000", created_utc="2026-11-21T09:00:00Z"),
        out_of_memory({"model": "xl"}, id="dddd00000000", created_utc="2026-11-21T10:00:00Z"),
    ]
    fill(path, *runs)
    return path


def test_without_an_id_the_newest_run_with_a_profile_is_explained(store: Path) -> None:
    assert run_to_explain(store=store).id == "bbbb00000000"
    found = explain(store=store)
    assert found.run_id == "bbbb00000000"
    assert found.step_s == pytest.approx(0.011)
    assert [f.kind for f in found.findings] == ["fp32_matmul"]


def test_any_run_is_explained_by_the_beginning_of_its_id(store: Path) -> None:
    assert explain("cccc", store=store).not_looked_at[0].startswith("the record has no profile")
    assert explain("dddd", store=store).findings == ()
    with pytest.raises(UserError, match="no record 'eeee'"):
        explain("eeee", store=store)


def test_a_store_without_profiles_says_how_to_get_one(tmp_path: Path) -> None:
    fill(tmp_path / "store.db", make_run({"model": "small"}))
    with pytest.raises(UserError, match="steplab profile"):
        explain(store=tmp_path / "store.db")


# --- the table of trials ----------------------------------------------------------------------------------


def test_the_table_shows_predicted_measured_and_error_of_the_step() -> None:
    taking = bench(base=0.012, default=0.009, sdpa="asked 8.00 GiB", batch_8=0.016)
    tried = try_findings(
        RUN,
        findings(
            finding("fusable_elementwise", 0.0042, compile="default"),
            finding("scores_materialised", None, attention="sdpa"),
            finding("batch_too_small", 0.001, batch="8"),
            finding("communication_exposed"),
        ),
        session=taking,
    )
    rows = sheet(trials_table(tried)).rows
    figures = [row[:3] + row[3:4] + row[6:] for row in rows]
    assert figures == [
        ("batch_too_small", "batch=8", "1.00 ms", "4.00 ms", "-25.0 %", "12.0 ms", "8.00 ms"),
        ("fusable_elementwise", "compile=default", "4.20 ms", "3.00 ms", "+10.0 %", "12.0 ms", "9.00 ms"),
        ("scores_materialised", "attention=sdpa", "–", "out of memory: asked 8.00 GiB", "–", "–", "–"),
    ]
    assert [row[4:6] for row in rows] == [("4.00 ms", "4.00 ms"), ("3.00 ms", "3.00 ms"), ("–", "–")]
