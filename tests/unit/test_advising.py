import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.advice_records import ratio, some_advice
from tests.first import first
from tests.runs import ENVIRONMENT, make_run
from tests.sure import sure
from tests.unit.explaining import op, profile, timing
from tests.unit.taking import FakeSession, Told

from steplab.errors import Remark, Unsupported
from steplab.lab.advising import advise
from steplab.lab.outlook import Outlook, Promise
from steplab.lab.turns import StoredSession
from steplab.measurement.processes.turns import Side
from steplab.records.advice import Advice, Tried
from steplab.records.codec import decode, encode
from steplab.records.comparison import Decision
from steplab.records.failure import Failure
from steplab.records.run import Run
from steplab.records.timing import Turns
from steplab.records.validation import check
from steplab.report.advice.document import REPORT as ADVICE_REPORT
from steplab.report.advice.document import advice_verdict, tried_words
from steplab.report.kit.document import Table
from steplab.report.kit.rendering import render
from steplab.report.kit.table import sheet
from steplab.report.run.verdict import run_cautions
from steplab.report.turns.document import turns_document
from steplab.specs.changes import CHANGES, changes_for
from steplab.specs.model import MODEL_SIZES
from steplab.specs.resolve import resolve_step, with_fields
from steplab.specs.step import FIELDS, StepSpec
from steplab.store.database import Store
from steplab.units import format_time

pytestmark = pytest.mark.usefixtures("predicted_once", "paces_of_triton_are_unknown")

FACTORS = {"bf16": 0.4, "tf32": 0.6, "auto": 0.8, "block": 0.85, "default": 0.8, "fused": 0.97, "adamw_triton": 1.02}
"""Factors on step time; missing choices have no effect."""


def product(spec: StepSpec) -> float:
    seconds = 0.1
    for choice in (spec.precision, spec.attention, spec.compile, spec.loss, spec.optimizer):
        seconds *= FACTORS.get(choice, 1.0)
    return seconds


@pytest.fixture
def walk(tmp_path: Path) -> Callable[..., Advice]:
    def walked(told: Told = product, **options: Any) -> Advice:
        walked.session = FakeSession(told)  # type: ignore[attr-defined]
        given = {"model": "small", "context": 512} | options.pop("fields", {})
        return advise(
            resolve_step({"steps": 30, **given}),
            store=tmp_path / "store.db",
            session=walked.session,  # type: ignore[attr-defined]
            profile=options.pop("profile", unprofiled),
            **options,
        )

    return walked


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Advice, Path]:
    store = tmp_path_factory.mktemp("walked") / "store.db"
    spec = resolve_step({"model": "small", "context": 512, "steps": 30})
    return advise(spec, store=store, session=FakeSession(product), profile=unprofiled), store


def unprofiled(spec: StepSpec, **options: Any) -> Run:
    raise AssertionError("a step that can be planned is not profiled")


def interrupted_walk(folder: Path) -> Advice:
    with Store.open(folder / "store.db", write=False) as opened:
        [row] = opened.rows(kind="advice")
        advice = opened.get(str(row["id"]))
    assert isinstance(advice, Advice)
    return advice


def interrupts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def interrupted(self: object, *given: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    return interrupted


def decisions(advice: Advice) -> dict[str, bool]:
    return {tried.words: tried.kept for tried in advice.tried}


# --- the walk ---------------------------------------------------------------------------------------------


def test_what_pays_is_kept_and_the_rest_is_tried_and_dropped(walked: tuple[Advice, Path]) -> None:
    advice, store = walked
    kept = {words for words, is_kept in decisions(advice).items() if is_kept}
    assert kept >= {"precision bf16", "attention auto", "compile default", "loss fused"}
    assert decisions(advice)["optimizer adamw_triton"] is False
    assert advice.best is not None
    assert (advice.best.precision, advice.best.attention, advice.best.compile) == ("bf16", "auto", "default")
    assert advice.untried == ()
    assert advice.best_s == pytest.approx(0.1 * 0.4 * 0.8 * 0.8 * 0.97)
    assert sure(advice.overall).ratio == pytest.approx(0.4 * 0.8 * 0.8 * 0.97, rel=1e-3)
    with Store.open(store, write=False) as opened:
        stored = {str(row["id"]): row for row in opened.rows(kind=None)}
    assert stored[advice.id]["kind"] == "advise"
    assert {tried.run_id for tried in advice.tried} | {advice.start_id, advice.best_id} <= set(stored)


def test_a_small_gain_is_kept_if_it_is_certain(walk: Callable[..., Advice]) -> None:
    def told(spec: StepSpec) -> float:
        merged = spec.model.shape is not None and spec.model.shape.projections == "merged"
        return product(spec) * (0.993 if merged else 1.0) * (0.9985 if spec.loss == "chunked" else 1.0)

    found = decisions(walk(told))
    assert found["block_ops triton with projections merged"]
    assert not found.get("loss chunked")


def test_each_change_is_made_to_the_fastest_step_until_then(walked: tuple[Advice, Path]) -> None:
    advice, _ = walked
    ends = {str(advice.start_id)}
    for tried in advice.tried:
        assert tried.base_id in ends
        assert tried.ratio is not None
        assert tried.kept == (tried.ratio.decision == "lower")
        if tried.kept:
            ends = {str(tried.run_id)}
    assert ends == {advice.best_id}


def test_a_change_brings_what_it_needs() -> None:
    start = resolve_step({"model": "small", "context": 512})
    [change] = [each for each in changes_for(start, "cuda", keep_precision=False) if each.brings(start)]
    assert change.words == "block_ops triton"
    assert change.made(start) == with_fields(start, {"block_ops": "triton", "model.projections": "merged"})


@pytest.mark.parametrize("share", [None, 0.001, 0.0, -0.1])
def test_what_the_recipe_sets_comes_before_changes_of_which_nothing_is_predicted(
    walk: Callable[..., Advice], monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    device = dataclasses.replace(ENVIRONMENT.device, kind="cpu", name="a CPU")
    monkeypatch.setattr(FakeSession, "environment", dataclasses.replace(ENVIRONMENT, device=device))
    predicted = {
        "attention": None if share is None else Promise(share=share, source="scores_materialised"),
        "compile": Promise(share=0.2, source="fusable_elementwise"),
        "loss": Promise(share=-0.1, source="loss_share"),
    }
    monkeypatch.setattr(Outlook, "promise", lambda self, spec, change: predicted.get(change.field))
    no_findings = make_run({"model": "tiny"}, failure=Failure(kind="error", message="why"))
    advice = walk(fields={"model": "tiny"}, profile=lambda spec, **options: no_findings)
    tried = [each.field for each in advice.tried]
    assert tried[-4:] == ["attention", "precision", "model.projections", "loss"]
    assert set(tried[:-4]) == {"compile"}


def test_what_came_of_a_change_is_told_before_the_next_begins(walk: Callable[..., Advice]) -> None:
    said: list[str] = []
    advice = walk(on_change=said.append, on_tried=lambda tried: said.append(tried_words(tried)))
    begun, ended = said[1::2][: len(advice.tried)], said[2::2]
    assert ended == [tried_words(tried) for tried in advice.tried]
    assert all(words.startswith(change) for change, words in zip(begun, ended, strict=True))


def test_a_given_precision_is_kept_if_asked(walk: Callable[..., Advice]) -> None:
    advice = walk(keep_precision=True)
    assert not any(tried.field == "precision" for tried in advice.tried)
    assert sure(advice.best).precision == "fp32"


def test_a_change_that_fails_or_is_refused_is_said_and_the_walk_goes_on(walk: Callable[..., Advice]) -> None:
    def told(spec: StepSpec) -> float | str | Exception:
        if spec.precision == "bf16":
            return "asked 8.00 GiB"
        return Unsupported("flash", "no kernel", "use plain") if spec.attention == "auto" else product(spec)

    advice = walk(told)
    failures = {tried.words: tried.failure for tried in advice.tried if tried.failure}
    assert failures["precision bf16"] == "out of memory: asked 8.00 GiB"
    assert "no kernel" in failures["attention auto"]
    assert sure(advice.best).precision == "tf32"


class CrowdedSession(FakeSession):
    def enter(self, label: str, spec: StepSpec, *further: Any) -> Side:
        if spec.cuda_graph == "step":
            self.alternating = "the device's memory does not hold all of them at once"
        return super().enter(label, spec, *further)

    def measure(self, sides: Any, steps: int, *, apart: bool = True, **options: Any) -> None:
        assert not (self.alternating and apart)
        if not self.alternating:
            super().measure(sides, steps, **options)


def test_a_step_that_fits_beside_no_other_is_dropped_and_the_rest_still_take_turns(tmp_path: Path) -> None:
    spec = resolve_step({"model": "small", "context": 512, "steps": 30})
    advice = advise(spec, store=tmp_path / "store.db", session=CrowdedSession(product), profile=unprofiled)
    [graph] = [tried for tried in advice.tried if tried.words == "cuda_graph step"]
    assert (
        graph.failure == "out of memory: with the fastest step: the device's memory does not hold all of them at once"
    )
    assert advice.tried[-1] is not graph
    assert all(tried.ratio for tried in advice.tried if tried is not graph)
    assert advice.alternating is None
    assert advice.best_s == pytest.approx(0.1 * 0.4 * 0.8 * 0.8 * 0.97)


def test_a_step_that_does_not_fit_gets_what_needs_less_memory(walk: Callable[..., Advice]) -> None:
    def told(spec: StepSpec) -> float | str | Exception:
        return product(spec) if spec.attention != "plain" and spec.precision == "bf16" else "asked 80 GiB"

    said: list[str] = []
    advice = walk(told, on_tried=lambda tried: said.append(tried_words(tried)))
    assert said[:2] == ["precision bf16: out of memory: asked 80 GiB; kept", "attention auto: makes the step run; kept"]
    assert advice.failure is None
    assert advice.start_s is None
    assert {"precision bf16", "attention auto"} <= {tried.words for tried in advice.kept}


@pytest.mark.parametrize(
    ("outcome", "kind", "said"),
    [
        ("asked 800 GiB", "out_of_memory", "out of memory: asked 800 GiB"),
        (Failure(kind="error", message="RuntimeError: kaputt"), "error", "error: RuntimeError: kaputt"),
    ],
)
def test_a_step_that_never_runs_is_a_failure_and_is_given_less_memory_only_where_it_did_not_fit(
    walk: Callable[..., Advice], outcome: Any, kind: str, said: str
) -> None:
    advice = walk(lambda spec: outcome)
    assert (advice.status, advice.best, advice.best_s) == (kind, None, None)
    assert (len(walk.session.asked) == 1) == (kind == "error")  # type: ignore[attr-defined]
    assert render(ADVICE_REPORT.document(advice), "table", width=200).count(f"No step ran: {said}.") == 1


def test_a_process_that_the_kernel_ended_ran_out_of_memory(walk: Callable[..., Advice]) -> None:
    def told(spec: StepSpec) -> float | Failure:
        killed = Failure(kind="crashed", message="the process was ended by SIGKILL", signal="SIGKILL")
        return product(spec) if spec.precision == "bf16" else killed

    advice = walk(told)
    assert (advice.failure, advice.start_s) == (None, None)
    assert "precision bf16" in {tried.words for tried in advice.kept}


def test_a_change_that_raises_an_error_makes_no_room(walk: Callable[..., Advice]) -> None:
    def told(spec: StepSpec) -> float | str | Failure:
        if spec.precision == "bf16":
            return Failure(kind="error", message="RuntimeError: kaputt")
        return product(spec) if spec.attention != "plain" else "asked 80 GiB"

    advice = walk(told)
    first = advice.tried[0]
    assert (first.words, first.kept, first.failure) == ("precision bf16", False, "error: RuntimeError: kaputt")
    assert first.run_id is not None
    assert sure(advice.best).precision != "bf16"
    assert "attention auto" in {tried.words for tried in advice.kept}


def test_a_fastest_step_that_dies_ends_the_walk_and_what_was_found_until_then_is_told(tmp_path: Path) -> None:
    class Fatal(FakeSession):
        def measure(self, sides: Any, *args: Any, **options: Any) -> None:
            super().measure(sides, *args, **options)
            if sides[-1].label == "compile block":
                sides[0].failure = Failure(kind="crashed", message="killed by SIGKILL")

    spec = resolve_step({"model": "small", "context": 512, "steps": 30})
    session: Any = Fatal(product)
    advice = advise(spec, store=tmp_path / "store.db", session=session, profile=unprofiled)
    assert advice.status == "crashed"
    first, *further = advice_verdict(advice).sentences
    assert first == "The fastest step failed, which ended the search: crashed: killed by SIGKILL."
    kept, told = ", ".join(tried.words for tried in advice.kept), f"{sure(advice.overall).ratio:.3f} times as long"
    assert further[0].startswith(f"Until then, with {kept} the step took 48.0 ms instead of 100 ms: {told}")


def test_no_change_is_begun_that_would_end_after_the_budget(walk: Callable[..., Advice]) -> None:
    now = 0.0

    def told(spec: StepSpec) -> float:
        nonlocal now
        now += 2.0  # when a side is built, and for each turn: of a plain difference and of none 12, else 20
        return product(spec) * (0.98 if spec.model.shape and spec.model.shape.projections == "merged" else 1.0)

    advice = walk(told, budget_s=210.0, clock=lambda: now)
    took, merged = {tried.words: tried.took_s for tried in advice.tried}, "block_ops triton with projections merged"
    assert {merged, "precision bf16"} <= took.keys()
    assert len(took) > 5  # which, is by the rates of the plan
    assert took == dict.fromkeys(took, 26.0) | {merged: 42.0}
    assert advice.untried_s is not None
    assert len(advice.untried) == len(advice.untried_shares) > 0
    assert 210.0 - now < advice.untried_s
    assert now <= 210.0
    assert "more of --budget" in " ".join(render(ADVICE_REPORT.document(advice), "table", width=200).split())


@pytest.mark.parametrize(("budget_s", "profiles", "tried"), [(1.0, 0, 0), (7.0, 0, 0), (17.0, 0, 1), (21.0, 1, 1)])
def test_a_budget_counts_from_the_start(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, budget_s: float, profiles: int, tried: int
) -> None:
    """Building a step takes 6 s, as does a profile: after the first there is time for nothing, a change, or both."""
    now, profiled = 0.0, 0

    class Slow(FakeSession):
        def enter(self, *args: Any, **options: Any) -> Any:
            nonlocal now
            now += 6.0
            return super().enter(*args, **options)

    def profiling(spec: StepSpec, **options: Any) -> Run:
        nonlocal now, profiled
        now, profiled = now + 6.0, profiled + 1
        return make_run({"model": "small"}, spec=spec, failure=Failure(kind="error", message="why"))

    advice = advise(
        resolve_step({"model": "mine:build", "steps": 10}),
        budget_s=budget_s,
        store=tmp_path / "store.db",
        session=Slow(lambda spec: 0.02),
        profile=profiling,
        clock=lambda: now,
    )
    assert (profiled, len(advice.tried)) == (profiles, tried)
    over = "the search took 5.00 s longer than its budget of 1.00 s: what had begun took longer than foreseen"
    assert (over in advice.notes) == (budget_s == 1.0)
    assert advice.start_s == pytest.approx(0.02, rel=0.01)
    assert now <= max(budget_s, 6.0)
    said = [str(warning.message) for warning in recwarn if isinstance(warning.message, Remark)]
    told = f"building the step as given took 6.00 s of the budget of {format_time(budget_s)}"
    assert [text.startswith(told) for text in said] == [True] * (not tried)


@pytest.mark.parametrize(("budget_s", "num_built"), [(None, 3), (25.0, 2), (15.0, 1), (5.0, 1)])
def test_a_budget_holds_for_what_makes_room_too(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, budget_s: float | None, num_built: int
) -> None:
    now = 0.0

    class Slow(FakeSession):
        def enter(self, *args: Any, **options: Any) -> Any:
            nonlocal now
            now += 10.0
            return super().enter(*args, **options)

    def told(spec: StepSpec) -> float | str:
        return "asked 800 GiB" if spec.precision == "fp32" or spec.attention == "plain" else product(spec)

    session = Slow(told)
    spec = resolve_step({"model": "small", "context": 512, "steps": 30})
    options: dict[str, Any] = {"session": session, "profile": unprofiled, "clock": lambda: now}
    advice = advise(spec, store=tmp_path / "store.db", budget_s=budget_s, **options)
    assert len(session.asked) >= 3 if budget_s is None else len(session.asked) == num_built
    assert (advice.failure is None) == (num_built == 3)
    said = [str(warning.message) for warning in recwarn if isinstance(warning.message, Remark)]
    next_one = "attention auto" if num_built == 2 else "precision bf16"
    over = f"the budget was over before {next_one} was tried, which needs less memory"
    assert said == [over] * (num_built < 3)


@pytest.mark.parametrize("late", ["built", "measured", "the fastest"])
def test_a_change_that_the_budget_cuts_off_is_told_as_that_and_counts_as_not_tried(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, late: str
) -> None:
    now = 0.0

    class Slow(FakeSession):
        def cut_off(self, side: Side) -> None:
            nonlocal now
            assert self.timeout_s is not None
            now += self.timeout_s
            side.failure = Failure(kind="timeout", message=f"did not end within {self.timeout_s:.3g} s")

        def enter(self, *args: Any, **options: Any) -> Side:
            nonlocal now
            now += 10.0
            side = super().enter(*args, **options)
            if side.spec.compile != "off" and late == "built":
                self.cut_off(side)
            return side

        def measure(self, sides: Any, *args: Any, **options: Any) -> None:
            super().measure(sides, *args, **options)
            if sides[-1].spec.compile != "off" and sides[-1].failure is None:
                self.cut_off(sides[0 if late == "the fastest" else -1])

    spec = resolve_step({"model": "small", "context": 512, "steps": 30})
    options: dict[str, Any] = {"session": Slow(product), "profile": unprofiled, "clock": lambda: now}
    advice = advise(spec, store=tmp_path / "store.db", budget_s=100.0, **options)
    assert advice.kept
    assert advice.failure is None
    assert advice.overall is not None
    assert not any(tried.failure for tried in advice.tried)
    cut_off = next(words for words in advice.untried if words.startswith("compile "))
    assert cut_off not in decisions(advice)
    [said] = [str(warning.message) for warning in recwarn if isinstance(warning.message, Remark)]
    told = f"the budget was over before {cut_off} was decided; it counts as not tried"
    if late == "built":
        assert said == told
        return
    turns = sure(re.fullmatch(f"{told}, and record ([0-9a-f]{{12}}) has the turns until then", said))
    with Store.open(tmp_path / "store.db", write=False) as opened:
        record = opened.get(turns[1])
    assert isinstance(record, Run)
    assert record.timing is not None


def test_an_interruption_keeps_the_walk_until_then(
    walk: Callable[..., Advice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(spec: StepSpec) -> float:
        if spec.compile != "off":
            raise KeyboardInterrupt
        return product(spec)

    with pytest.raises(KeyboardInterrupt, match="has the search until then"):
        walk(told)
    advice = interrupted_walk(tmp_path)
    assert advice.best is not None
    assert decisions(advice)[advice.kept[0].words]
    assert advice.notes[0].startswith("interrupted")
    assert all(tried.ratio for tried in advice.tried)
    assert advice.overall is not None
    assert any(words.startswith("compile ") for words in advice.untried)
    assert any(
        text.startswith("Not tried, because the search was interrupted") for text in advice_verdict(advice).sentences
    )


@pytest.mark.parametrize("within", ["the look at it", "its end"])
def test_an_interruption_just_after_a_change_was_kept_keeps_it(
    walk: Callable[..., Advice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    def kept(tried: Tried) -> None:
        if tried.kept:
            owner, name = (Outlook, "see") if within == "the look at it" else (FakeSession, "leave")
            monkeypatch.setattr(owner, name, interrupts(monkeypatch))

    with pytest.raises(KeyboardInterrupt, match="has the search until then"):
        walk(on_tried=kept)
    advice = interrupted_walk(tmp_path)
    with Store.open(tmp_path / "store.db", write=False) as opened:
        assert isinstance(opened.get(str(advice.start_id)), Run)
    [only] = advice.kept
    assert (only.base_id, only.run_id) == (advice.start_id, advice.best_id)
    assert advice.overall == only.ratio


def test_an_interruption_while_a_walk_is_recorded_keeps_all_of_it(
    walk: Callable[..., Advice], walked: tuple[Advice, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outlook, "by_hand", interrupts(monkeypatch))
    with pytest.raises(KeyboardInterrupt, match="has the search until then"):
        walk()
    advice = interrupted_walk(tmp_path)
    assert decisions(advice) == decisions(walked[0])
    assert advice.best == walked[0].best


def test_an_interruption_before_a_walk_knows_how_long_building_takes_is_that_alone(
    walk: Callable[..., Advice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outlook, "compile_s", interrupts(monkeypatch))
    with pytest.raises(KeyboardInterrupt):
        walk()


def test_a_side_that_leaves_again_is_stored_once(tmp_path: Path) -> None:
    session: Any = FakeSession(lambda spec: "too small a device")
    with Store.open(tmp_path / "store.db", write=True) as store, StoredSession(session, store, "") as taking:
        side = taking.enter("start", resolve_step({"model": "small"}))
        assert taking.leave(side) is taking.leave(side)
        assert [row["status"] for row in store.rows(kind=None)] == ["out_of_memory"]


# --- where nothing can be planned -------------------------------------------------------------------------


def test_a_model_of_the_users_is_profiled_and_the_rest_is_said_as_code(walk: Callable[..., Advice]) -> None:
    ops = [
        op("aten::silu", "elementwise", 3.0, where="layers.*.ff", calls=12),
        op("aten::mul", "elementwise", 4.0, where="layers.*.ff", calls=12),
        op("aten::mm", "matmul", 10.0, dtype="fp32", calls=60, flops=5e11, moved=1e9),
    ]
    asked: list[StepSpec] = []

    def profiled(spec: StepSpec, **options: Any) -> Run:
        asked.append(spec)
        return make_run({"model": "small"}, spec=spec, profile=profile(ops), timing=timing(20.0, optimizer=1.0))

    advice = walk(fields={"model": "mine:build"}, profile=profiled)
    assert [spec.steps for spec in asked] == [5]
    assert {tried.field for tried in advice.tried} <= {"precision", "compile", "cuda_graph", "optimizer"}
    predicted = {tried.words: tried.predicted_by for tried in advice.tried if tried.predicted_by}
    assert predicted["compile default"] == "fusable_elementwise"
    assert all(not finding.fields for finding in advice.by_hand)


# --- the table of changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.words)
def test_a_change_is_a_valid_value_of_a_field(change: Any) -> None:
    assert change.value in FIELDS[change.field].choices or change.field == "checkpointing"
    assert bool(change.numerics) == (change.field == "precision" and change.value != "bf16_master")
    assert set(change.pointless_after) <= {other.value for other in CHANGES if other.field == change.field}


def test_a_change_applies_where_its_field_has_an_effect() -> None:
    def fields(kind: str, **given: object) -> set[str]:
        return {change.field for change in changes_for(resolve_step(given), kind, keep_precision=False)}

    assert "small" in MODEL_SIZES
    assert "optimizer" not in fields("cpu", model="small")
    assert "optimizer" in fields("cpu", model="small", optimizer="adamw_loop")
    assert fields("cpu", model="mine:build") == {"precision", "compile"}
    assert "optimizer" not in fields("cuda", model="small", **{"pass": "forward"})
    assert "checkpointing" in fields("cpu", model="small", checkpointing="full")


def test_masters_are_a_change_of_a_step_in_bf16_whose_optimizer_keeps_them() -> None:
    def words(given: dict[str, object], kind: str = "cuda") -> set[str]:
        spec = resolve_step({"model": "small", "precision": "bf16", "optimizer": "adamw_triton"} | given)
        return {change.words for change in changes_for(spec, kind, keep_precision=True)}

    assert "precision bf16_master" in words({})
    assert "precision bf16_master" in words({"pass": "forward_backward"})
    others: list[dict[str, object]] = [
        {"precision": "fp32"}, {"optimizer": "sgd"}, {"accumulation": 2}, {"layout": "dp=2"},
    ]  # fmt: skip
    for given in others:
        assert "precision bf16_master" not in words(given)
    assert "precision bf16_master" not in words({}, "cpu")
    spec = resolve_step({"model": "small", "precision": "bf16", "optimizer": "adamw_fused"})
    [masters] = [change for change in changes_for(spec, "cuda", keep_precision=True) if change.value == "bf16_master"]
    assert [change.words for change in masters.brings(spec)] == ["optimizer adamw_triton"]
    assert masters.made(spec) == with_fields(spec, {"precision": "bf16_master", "optimizer": "adamw_triton"})


# --- the record and its report ----------------------------------------------------------------------------


def test_a_line_says_what_a_change_saves_and_that_it_is_kept() -> None:
    paid, cost, failed = some_advice().tried
    same, undecided = (dataclasses.replace(cost, ratio=ratio(0.02, 0.0201, word)) for word in ("same", "undecided"))
    assert [tried_words(tried) for tried in (paid, cost, same, undecided, failed)] == [
        "precision bf16: saves 20.0 ms (50.0 %); kept",
        "compile block: costs 1.00 ms (5.0 %); dropped",
        "compile block: no gain; dropped",
        "compile block: not decided; dropped",
        "loss fused: out of memory: asked 8 GiB; dropped",
    ]


def test_the_answer_says_why_a_change_is_slower_by_itself_and_with_what_it_was_kept() -> None:
    alone = Tried(
        field="block_ops", value="triton", along=("projections merged",), code=("…",), predicted_share=0.05,
        ratio=ratio(0.067, 0.091, "higher"), waits_for_host=True,
    )  # fmt: skip
    joined = dataclasses.replace(
        alone,
        along=("projections merged", "cuda_graph step"),
        kept=True,
        ratio=ratio(0.068, 0.062, "lower"),
        waits_for_host=None,
    )
    advice = dataclasses.replace(some_advice(), tried=(*some_advice().tried, alone, joined))
    sentences = advice_verdict(advice).sentences
    assert "Tried and not kept: compile block (slower), loss fused (failed)." in sentences
    why = "slower because the host launches it too late"
    assert f"block_ops triton with projections merged by itself: {why}; kept with cuda_graph step." in sentences


@pytest.mark.parametrize(("b_s", "said"), [(0.0200, False), (0.0201, False), (0.0203, True), (0.0160, True)])
def test_a_ratio_that_is_not_the_quotient_of_the_times_beside_it_says_so(b_s: float, said: bool) -> None:
    of_turns = dataclasses.replace(ratio(0.040, 0.020, "lower"), b=b_s)
    labels = [dataclasses.replace(make_run(), turns=Turns(label=label, session="s")) for label in "AB"]
    compared = turns_document([labels], [[of_turns]], ["as it is", "the other"])
    walked = ADVICE_REPORT.document(dataclasses.replace(some_advice(), overall=of_turns, best_s=b_s))
    for document in (compared, walked):
        text = " ".join(render(document, "table", width=300).split())
        source = "; a ratio from turns, not of these times" * said
        assert f"0.500 times as long (95 % interval 0.490 to 0.510{source})" in text


BUSY = {"other_cpus": 7.5, "num_cpus": 8}


@pytest.mark.parametrize("busy_for", first(1, ["bf16", "none", "all"]))
def test_the_answer_warns_of_steps_that_were_measured_on_a_busy_machine(
    walk: Callable[..., Advice], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, busy_for: str
) -> None:
    turn = FakeSession._turn

    def disturbed(self: FakeSession, side: Side, steps: int) -> None:
        turn(self, side, steps)
        assert side.run is not None
        if busy_for in ("all", side.spec.precision):
            environment = dataclasses.replace(ENVIRONMENT, **BUSY)  # type: ignore[arg-type]
            side.run = dataclasses.replace(side.run, environment=environment)

    monkeypatch.setattr(FakeSession, "_turn", disturbed)
    advice = walk()
    assert sure(advice.best).precision == "bf16"
    cautions = [text for text in advice_verdict(advice).cautions if "busy" in text]
    said = "Other processes kept 7.5 of 8 processors busy during the measurement."
    steps = {"all": ("the fastest step", "the step as given"), "bf16": ("the fastest step",), "none": ()}[busy_for]
    assert len(cautions) == len(steps)
    with Store.open(tmp_path / "store.db") as store:
        for caution, step in zip(cautions, steps, strict=True):
            found = re.fullmatch(rf"Warning: {step} \((\w+)\): {re.escape(said)}", caution)
            assert found
            run = store.get(found[1])
            assert isinstance(run, Run)
            assert f"Warning: {said}" in run_cautions(run)


@pytest.mark.parametrize(
    ("decision", "b_s", "walked", "in_turns"),
    [
        ("higher", 0.019, "slower", "B (the other) is slower than A"),
        ("lower", 0.019, "kept", "B (the other) is faster than A"),
        ("same", 0.019, "no gain", "B (the other) takes as long as A"),
        ("not higher", 0.0199, "not decided", "whether it is faster is not known"),
        (
            "not higher",
            0.019,
            "gain perhaps below 1 %",
            "B (the other) is probably faster than A, but perhaps by less than 1.0 %",
        ),
        ("undecided", 0.0203, "no gain", "B (the other) is probably slower than A, but perhaps by less than 1.0 %"),
        ("undecided", 0.019, "not decided", "Not decided whether B (the other) differs from A"),
    ],
)
def test_whatever_was_decided_is_said(decision: Decision, b_s: float, walked: str, in_turns: str) -> None:
    told = ratio(0.020, b_s, decision)
    advice = some_advice()
    (found, *_) = advice.tried
    advice = dataclasses.replace(advice, tried=(dataclasses.replace(found, kept=decision == "lower", ratio=told),))
    assert walked in render(ADVICE_REPORT.document(advice), "csv")
    labels = [dataclasses.replace(make_run(), turns=Turns(label=label, session="s")) for label in "AB"]
    assert in_turns in render(turns_document([labels], [[told]], ["as it is", "the other"]), "table", width=300)


def test_a_walk_without_a_gain_says_so() -> None:
    advice = some_advice()
    slower = dataclasses.replace(advice, tried=advice.tried[1:], best=advice.spec, best_s=advice.start_s, overall=None)
    assert (
        "None of the changes tried was shown to pay: the step as given takes 40.0 ms."
        in advice_verdict(slower).sentences
    )
    untried = dataclasses.replace(slower, tried=())
    assert advice_verdict(untried).sentences[0] == "No change was tried: the step as given takes 40.0 ms."
    assert advice_verdict(untried).cautions == ()


def test_a_walk_is_stored_as_it_was_and_draws_its_changes() -> None:
    advice = some_advice()
    assert decode(encode(advice)) == advice
    check(advice)
    (table,) = (block for block in ADVICE_REPORT.document(advice).sections[0].blocks if isinstance(block, Table))
    (lengths,) = sheet(table).bars.values()
    assert [row["after_s"] for row in table.rows] == pytest.approx([0.02, 0.021, None])
    assert lengths == pytest.approx((0.02 / 0.021, 1.0, 0.0))
