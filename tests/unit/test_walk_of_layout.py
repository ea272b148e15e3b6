import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.runs import make_run
from tests.sure import sure
from tests.unit.taking import Told

from steplab.costs.rates import gpu_named
from steplab.errors import Remark, Unsupported
from steplab.lab import outlook
from steplab.lab.advising import advise
from steplab.measurement.jobs import StepTask
from steplab.measurement.processes import turns as processes
from steplab.plan.layout.links import machine_of
from steplab.plan.layout.time import LayoutClock
from steplab.plan.memory import predict_memory
from steplab.records.advice import Advice
from steplab.records.codec import new_id
from steplab.records.failure import Failure
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.report.advice.document import REPORT as ADVICE_REPORT
from steplab.report.kit.rendering import render
from steplab.specs.attention_kernels import chosen_by_auto
from steplab.specs.hardware import hardware_named
from steplab.specs.resolve import resolve_step, with_fields
from steplab.specs.step import StepSpec

FSDP = {"model": "8b", "context": 2048, "batch": 1, "precision": "bf16", "layout": "fsdp=2", "checkpointing": "full"}
LONG = FSDP | {"context": 32768, "precision": "bf16_pure", "attention": "auto"}
START_S = 20.0
FACTORS = {"attention": {"auto": 0.2}, "checkpointing": {"none": 0.8, "selective": 0.85}, "compile": {"block": 0.97}}


def product(spec: StepSpec) -> float:
    seconds = 0.2
    for field, factors in FACTORS.items():
        seconds *= factors.get(getattr(spec, field), 1.0)
    return seconds


def compiled_pays(spec: StepSpec) -> float:
    return product(spec) * (0.8 if spec.compile == "block" else 1.0)


class Started:
    def __init__(self, told: Told) -> None:
        self._told = told
        self.turns: list[tuple[StepSpec, int]] = []
        self.now_s = 0.0

    def measure(self, task: StepTask, **options: Any) -> Run:
        spec = task.spec
        outcome = self._told(spec)
        if isinstance(outcome, Exception):
            raise outcome
        self.turns.append((dataclasses.replace(spec, steps=30), spec.steps))
        self.now_s += START_S
        if isinstance(outcome, str):
            return make_run(
                {"model": "small"}, id=new_id(), spec=spec, timing=None,
                failure=Failure(kind="out_of_memory", message=outcome),
            )  # fmt: skip
        assert isinstance(outcome, float)
        self.now_s += spec.steps * outcome
        samples = tuple(outcome * (1 + 0.0005 * (number % 5 - 2)) for number in range(spec.steps))
        timing = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", device_s=samples),))
        return make_run({"model": "small"}, id=new_id(), spec=spec, timing=timing)


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def walked(told: Told = product, fields: dict[str, Any] = FSDP, **options: Any) -> tuple[Advice, Started]:
        started = Started(told)
        monkeypatch.setattr(processes, "measure_in_child", started.measure)
        monkeypatch.setattr(processes, "Conversation", None)  # no process waits for turns
        spec = resolve_step({"steps": 30, **fields})
        advice = advise(spec, store=tmp_path / "store.db", profile=unprofiled, clock=lambda: started.now_s, **options)
        return advice, started

    return walked


def unprofiled(spec: StepSpec, **options: Any) -> Run:
    raise AssertionError("a layout that can be planned is not profiled")


def test_what_pays_beyond_what_processes_differ_by_is_kept(walk: Any) -> None:
    advice, _ = walk()
    tried = {each.words: each for each in advice.tried}
    assert [each.words for each in advice.kept] == ["attention auto", "checkpointing none"]
    assert list(tried)[:2] == ["attention auto", "checkpointing none"]  # which may fit with that attention alone
    assert (advice.start_s, advice.best_s) == (pytest.approx(0.2), pytest.approx(0.2 * 0.2 * 0.8))
    assert sure(advice.overall).ratio == pytest.approx(0.16)
    assert not tried["compile block"].kept  # 3 per cent
    assert "checkpointing selective" not in tried  # recomputing nothing does the same and more
    assert advice.alternating == "a step of several processes cannot wait for its turn"


def test_each_turn_is_of_new_processes_and_the_fastest_step_begins_or_has_just_had_one(walk: Any) -> None:
    advice, started = walk()
    assert [steps for _, steps in started.turns[:3]] == [30, 30, 15]
    start, first, second = (spec for spec, _ in started.turns[:3])
    assert start == second == advice.spec
    assert first.attention == "auto"
    # No step has two turns that follow each other: such are one.
    assert all(len(list(same)) == 1 for _, same in groupby(spec for spec, _ in started.turns))
    ratios = [each.ratio for each in advice.tried]
    assert all(ratio and ratio.threshold == 0.05 and min(ratio.num_a, ratio.num_b) == 30 for ratio in ratios)


def test_the_answer_gives_the_times_of_the_turns_that_were_compared(walk: Any) -> None:
    turns, last_quick = 0, 1000

    def told(spec: StepSpec) -> float:
        nonlocal turns
        turns += 1
        return (0.1 if turns <= last_quick else 0.2) * (0.8 if spec.loss == "fused" else 1.0)

    _, started = walk(told)
    turns, last_quick = 0, next(place for place, (spec, _) in enumerate(started.turns) if spec.loss == "fused") - 1
    advice, _ = walk(told)
    assert [each.words for each in advice.kept] == ["loss fused"]
    assert advice.overall is not None
    assert (advice.start_s, advice.best_s) == (advice.overall.a, advice.overall.b)
    assert (advice.start_s, advice.best_s) == (pytest.approx(0.2), pytest.approx(0.16))
    assert "Each turn was a process of its own" in " ".join(render(ADVICE_REPORT.document(advice), width=200).split())


def test_nothing_is_tried_that_the_layout_cannot_have_or_has_anyway(walk: Any) -> None:
    advice, _ = walk()
    tried = {each.words for each in advice.tried}
    assert not tried & {"update overlapped", "cuda_graph step", "optimizer adamw_triton", "precision bf16_master"}
    assert {"reshard_after_forward never", "loss fused", "projections merged"} <= tried
    fields = {"model": "medium", "context": 512, "batch": 4, "layout": "fsdp=2,pp=2"}  # which keeps them gathered
    tried = {each.words for each in walk(lambda spec: 0.1, fields)[0].tried}
    assert "attention auto" in tried
    assert "reshard_after_forward never" not in tried


def test_a_layout_is_predicted_by_its_plan_and_what_that_does_not_know_is_not(walk: Any) -> None:
    advice, _ = walk(compiled_pays)
    first, *others = advice.tried
    clock = LayoutClock(gpu_named("H200 SXM"), machine_of(hardware_named("H200 SXM"), None))
    start = resolve_step(FSDP)
    auto = chosen_by_auto(start, sure(start.model.shape), "NVIDIA H200").implementation
    before, after = clock.time(start), clock.time(with_fields(start, {"attention": auto}))
    assert before is not None
    assert after is not None
    assert (first.words, first.predicted_by) == ("attention auto", "plan layout")
    assert first.predicted_share == pytest.approx(1 - after.seconds / before.seconds)
    [unknown] = [each for each in others if each.words == "compile default"]
    assert (unknown.predicted_share, unknown.predicted_by) == (None, "")
    words = [each.words for each in others]
    assert words.index("compile default") < words.index("projections merged"), "the recipe's, which saves too little"


def test_gradients_and_the_optimizer_of_data_parallel_ranks(walk: Any) -> None:
    fields = {"model": "small", "context": 512, "layout": "dp=2", "data_parallel": "naive"}
    told = {"naive": 0.1, "bucketed": 0.08}
    advice, _ = walk(lambda spec: told[spec.data_parallel], fields)
    tried = {each.words: each for each in advice.tried}
    assert [each.words for each in advice.kept] == ["data_parallel bucketed"]
    assert tried["data_parallel bucketed"].predicted_by == "plan layout"
    assert tried["optimizer adamw_triton"].predicted_by == ""
    assert "reshard_after_forward never" not in tried


def test_a_layout_that_does_not_fit_gets_what_needs_less_memory(walk: Any) -> None:
    def told(spec: StepSpec) -> float | str:
        return product(spec) if spec.attention == "auto" and spec.loss == "fused" else "asked 80 GiB"

    advice, _ = walk(told)
    assert advice.failure is None
    assert advice.start_s is None
    assert {"attention auto", "loss fused"} <= {each.words for each in advice.kept}
    assert advice.best_s == pytest.approx(0.2 * 0.2 * 0.8)
    [runs] = [each for each in advice.tried if each.words == "loss fused"]
    assert runs.ratio is None
    assert runs.step_s == pytest.approx(0.2 * 0.2)  # nothing to compare it with, but a time


def too_large(spec: StepSpec) -> float | str:
    return "asked 8.00 GiB" if spec.checkpointing == "none" else compiled_pays(spec)


def test_what_is_predicted_not_to_fit_is_tried_when_nothing_else_is_left(walk: Any) -> None:
    advice, _ = walk(too_large, LONG)
    *others, last = tried = {each.words: each for each in advice.tried}
    assert {last, others[-1]} == {"checkpointing none", "reshard_after_forward never"}
    assert (tried["checkpointing none"].predicted_share or 0.0) > 0
    assert (tried["attention sdpa_cudnn"].predicted_share or 0.0) < 0
    assert tried["checkpointing none"].failure == "out of memory: asked 8.00 GiB"


def test_what_saves_but_does_not_fit_is_tried_with_what_needs_less_memory(walk: Any) -> None:
    advice, _ = walk(too_large, LONG)
    compiled, selective, *others = advice.tried
    assert compiled.words == "compile block"
    assert selective.words == "checkpointing selective with loss fused"
    assert selective.predicted_share is not None
    assert selective.predicted_share > (compiled.predicted_share or 0.0)
    assert selective.kept
    assert advice.best is not None
    assert (advice.best.checkpointing, advice.best.loss) == ("selective", "fused")
    assert "loss fused" not in {each.words for each in others}


def test_what_makes_room_does_not_decide_the_fate_of_what_it_makes_room_for(walk: Any) -> None:
    def told(spec: StepSpec) -> float | str | Exception:
        return Unsupported("loss fused", "no Triton", "use chunked") if spec.loss == "fused" else too_large(spec)

    advice, _ = walk(told, LONG)
    words = [each.words for each in advice.tried]
    with_fused, with_chunked = (f"checkpointing selective with loss {loss}" for loss in ("fused", "chunked"))
    assert words.index(with_fused) < words.index(with_chunked)
    assert with_chunked in {each.words for each in advice.kept}


def test_what_saves_by_itself_comes_before_what_it_makes_room_for(walk: Any) -> None:
    fields = LONG | {"context": 16384, "batch": 2, "model.vocab_size": 1_000_000, "model.num_layers": 8}
    advice, _ = walk(lambda spec: compiled_pays(spec) * {"plain": 1.0, "chunked": 1.3, "fused": 0.8}[spec.loss], fields)
    words = [each.words for each in advice.tried]
    assert "loss fused" in {each.words for each in advice.kept}
    assert not any("with loss" in each for each in words)


def test_what_fits_too_tightly_to_be_promised_comes_after_what_fits(walk: Any) -> None:
    spec = resolve_step(LONG | {"context": 8192, "precision": "bf16", "checkpointing": "none"})
    [verdict] = [card.verdict for card in predict_memory(spec, device="NVIDIA H200").cards if card.gpu == "H200 SXM"]
    assert verdict == "too tight to promise"
    advice, _ = walk(too_large, LONG | {"context": 8192, "precision": "bf16"})
    first, *_ = words = [each.words for each in advice.tried]
    assert first == "checkpointing selective"
    assert words.index("checkpointing none") < words.index("attention sdpa_cudnn"), "which should cost time"


def test_what_nothing_is_known_of_keeps_its_place(walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(spec: StepSpec, **options: Any) -> MemoryPrediction:
        raise Unsupported("predicting", "it is not known", "leave it out")

    monkeypatch.setattr(outlook, "predict_memory", predicted)
    advice, _ = walk(too_large, LONG)
    assert [each.words for each in advice.tried][:2] == ["checkpointing none", "checkpointing selective"]


def test_no_saving_is_promised_of_what_is_predicted_not_to_fit(walk: Any) -> None:
    advice, _ = walk(too_large, LONG, budget_s=26.0 + 72.0)
    assert len(advice.tried) == 1
    *others, none = advice.untried
    assert none == "checkpointing none"
    assert advice.untried_fits == (*[True] * len(others), False)
    text = " ".join(render(ADVICE_REPORT.document(advice), "table", width=200).split())
    assert "checkpointing none (predicted not to fit the GPU's memory). Trying them takes" in text
    assert "checkpointing selective with loss fused (predicted to save" in text


def test_a_budget_counts_the_processes_of_each_change(walk: Any, recwarn: pytest.WarningsRecorder) -> None:
    advice, started = walk(budget_s=26.0 + 71.0)
    assert (len(advice.tried), len(started.turns)) == (0, 1)
    assert advice.untried_s is not None
    told = [str(warning.message) for warning in recwarn if isinstance(warning.message, Remark)]
    assert told == [
        "measuring the step as given took 26.0 s of the budget of 97.0 s, and each change takes at least twice as "
        "long: only the step as given is measured"
    ]
    advice, started = walk(budget_s=26.0 + 72.0)
    assert len(advice.tried) == 1
    assert started.now_s <= 98.0
