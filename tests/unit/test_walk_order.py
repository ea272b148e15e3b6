"""Order of the search on an H200 behind a slow and a fast host.

Steps take `plan time`'s device time and a given host pace, with noise while the device waits. The clock includes
building and compiling.
"""

import dataclasses
import math
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.advice_records import ratio
from tests.first import first
from tests.sure import sure
from tests.unit.taking import FakeSession

from steplab.comparison.turns import chained
from steplab.costs.rates import gpu_named
from steplab.lab import outlook
from steplab.lab.advising import advise
from steplab.measurement.processes.turns import Side
from steplab.plan.host import compile_s, on_the_host_of
from steplab.plan.memory import predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.advice import Advice
from steplab.records.prediction import MemoryPrediction
from steplab.records.step_time import StepTimePrediction
from steplab.records.timing import PhaseSamples, Timing
from steplab.specs.attention_kernels import chosen_by_auto
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

pytestmark = pytest.mark.usefixtures("predicted_once", "paces_of_triton_are_unknown")

H200 = gpu_named("H200 SXM")
START_S, TURNS_S = 10.0, 10.0


@cache
def planned(spec: StepSpec) -> StepTimePrediction:
    return predict_step_time(spec, H200)


class HostSession(FakeSession):
    waiting_noise = 0.08
    """Relative standard deviation of steps that wait for a shared host."""

    def __init__(self, eager_s: float, compiled_s: float, noise: float = 0.002) -> None:
        super().__init__(lambda spec: sum(seconds for seconds, _ in self.phases(spec).values()))
        self._noise = noise
        self._pace_s = {False: eager_s, True: compiled_s}
        self._random = random.Random(0)
        self.now_s = 0.0

    def phases(self, spec: StepSpec) -> dict[str, tuple[float, float]]:
        prediction, found = planned(spec), {}
        for times in prediction.phases[:-1]:
            kernels = sum(part.kernels for part in prediction.parts if part.phase == times.phase)
            launched_s = kernels * self._pace_s[spec.compile != "off"]
            if spec.replays_model or times.phase == "optimizer":
                launched_s = 0.0
            found[times.phase] = max(times.device_s, launched_s), max(times.device_s - launched_s, 0.0)
        return found

    def enter(self, label: str, spec: StepSpec, *further: Any) -> Side:
        self.now_s += START_S + compile_s(spec, H200.rates.host)
        return super().enter(label, spec, *further)

    def measure(self, sides: Any, steps: int, **options: Any) -> None:
        self.now_s += TURNS_S if len(sides) > 1 else 0.0
        super().measure(sides, steps, **options)

    def _turn(self, side: Side, steps: int) -> None:
        super()._turn(side, steps)
        assert side.run is not None
        assert side.run.timing is not None
        phases = self.phases(side.spec)
        waits = not all(lead for _, lead in phases.values())
        before = sure(side.run.turns).num_steps - steps
        known = {phase.phase: phase.best_s for phase in getattr(side, "timed", ())}
        noise = [1 + self._random.gauss(0.0, self.waiting_noise if waits else self._noise) for _ in range(steps)]
        phases["step"] = sum(s for s, _ in phases.values()), min(lead for _, lead in phases.values())
        timed = tuple(
            PhaseSamples(
                phase=name,
                device_s=(*known.get(name, ()), *(seconds * each for each in noise)),
                lead_s=(lead,) * (before + steps),
            )
            for name, (seconds, lead) in phases.items()
        )
        side.timed = timed  # type: ignore[attr-defined]  # the next turn goes on from it
        timing = Timing(warmup=(), back_to_back=timed, first_step_s=compile_s(side.spec, H200.rates.host) or None)
        side.run = dataclasses.replace(side.run, timing=timing)


class SteadySession(HostSession):
    waiting_noise = 0.002


class LateSession(HostSession):
    def phases(self, spec: StepSpec) -> dict[str, tuple[float, float]]:
        found = super().phases(spec)
        if spec.block_ops == "triton" and not spec.replays_model:
            return {
                name: (max(s, 0.056), 0.0) if name != "optimizer" else (s, lead) for name, (s, lead) in found.items()
            }
        return found


def walk(
    store: Path,
    *,
    eager_s: float,
    compiled_s: float,
    budget_s: float,
    noise: float = 0.002,
    of: type[HostSession] = HostSession,
    **fields: object,
) -> Advice:
    session = of(eager_s, compiled_s, noise)
    spec = resolve_step({"context": 512, "precision": "bf16", "steps": 30, **fields})
    return advise(spec, store=store, session=session, budget_s=budget_s, clock=lambda: session.now_s)


@pytest.fixture(scope="module")
def behind_a_slow_host(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    store = tmp_path_factory.mktemp("slow") / "store.db"
    return walk(store, model="large", eager_s=20e-6, compiled_s=33e-6, budget_s=205.0)


@pytest.fixture(scope="module")
def behind_a_quick_host(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    store = tmp_path_factory.mktemp("quick") / "store.db"
    return walk(store, model="2.7b", eager_s=11e-6, compiled_s=11e-6, budget_s=300.0)


def fastest_attention(spec: StepSpec) -> str:
    def device_s(name: str) -> float:
        return predict_step_time(dataclasses.replace(spec, attention=name), H200).step.device_s

    return min(("auto", "flash_triton"), key=device_s)


def test_a_host_bound_step_gets_its_cuda_graph_before_anything_small(behind_a_slow_host: Advice) -> None:
    words = [tried.words for tried in behind_a_slow_host.tried]
    assert words[0] == "cuda_graph step"
    best = sure(behind_a_slow_host.best)
    assert (best.block_ops, best.cuda_graph) == ("triton", "step")
    assert best.attention == fastest_attention(best)
    fastest_s = predict_step_time(dataclasses.replace(best, optimizer="adamw_triton"), H200).step.device_s
    assert behind_a_slow_host.best_s == pytest.approx(fastest_s, rel=0.02)


def test_waits_of_the_host_are_in_the_prediction(tmp_path: Path) -> None:
    """The graph saves mostly host time, which only measured steps show: a fast host's step would lose a fourteenth. The
    step is two phases that vary by 0.002 each.
    """
    slow = {"model": "large", "eager_s": 20e-6, "compiled_s": 33e-6, "budget_s": 60.0}
    graph = walk(tmp_path / "store.db", of=SteadySession, **slow).tried[0]  # type: ignore[arg-type]
    assert graph.words == "cuda_graph step"
    assert graph.predicted_share == pytest.approx(1 - sure(graph.ratio).ratio, abs=0.004)
    assert graph.predicted_share is not None
    assert graph.predicted_share > 0.2


@pytest.mark.parametrize("told", first(1, ["behind_a_slow_host", "behind_a_quick_host"]))
def test_what_cannot_be_seen_in_the_noise_comes_last_and_what_is_the_same_step_never(
    told: str, request: pytest.FixtureRequest
) -> None:
    advice: Advice = request.getfixturevalue(told)
    shares = [tried.predicted_share for tried in advice.tried]
    seen = [share is not None and share > 0.01 for share in shares]
    assert seen == sorted(seen, reverse=True)
    words = {tried.words for tried in advice.tried} | set(advice.untried)
    assert "attention auto" in words
    best = sure(advice.best)
    assert f"attention {chosen_by_auto(best, sure(best.model.shape), 'NVIDIA H200').implementation}" not in words
    assert "loss fused" in words
    assert "loss chunked" not in words


@pytest.mark.release
def test_where_the_host_is_ahead_the_device_decides(behind_a_quick_host: Advice) -> None:
    words = [tried.words for tried in behind_a_quick_host.tried]
    best = sure(behind_a_quick_host.best)
    assert f"attention {fastest_attention(best)}" in words[:3]
    masters = next(place for place, each in enumerate(words) if each.startswith("precision bf16_master"))
    assert words.index("cuda_graph step") > masters


def test_what_is_left_of_the_recipe_is_tried_as_one_where_turns_leave_a_part_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TURNS_S", 4.4)
    fields = {"compile": "block", "precision": "bf16_master", "optimizer": "adamw_triton", "attention": "flash_triton"}
    for noise in (0.05, 0.07):
        quick = {"eager_s": 11e-6, "compiled_s": 11e-6, "budget_s": 400.0, "noise": noise}
        advice = walk(tmp_path / f"{noise}.db", model="2.7b", steps=10, **quick, **fields)  # type: ignore[arg-type]
        rest = {"cuda_graph step", "update overlapped"}
        [place] = [place for place, tried in enumerate(advice.tried) if rest <= set(tried.all_words)]
        together, before = advice.tried[place], advice.tried[:place]
        alone = [tried for tried in before if tried.words in rest]
        assert alone
        assert not any(tried.kept for tried in alone)
        assert {"    update.finish()", "    graph.replay()"} <= set(together.code)
        assert together.kept
        assert (together.predicted_share or 0.0) > max(tried.predicted_share or 0.0 for tried in alone)
        assert is_the_recipe(advice.best)


def is_the_recipe(best: StepSpec | None) -> bool:
    return best is not None and (best.block_ops, best.cuda_graph, best.update) == ("triton", "step", "overlapped")


def test_what_the_host_cannot_launch_in_time_is_tried_with_graphs(tmp_path: Path) -> None:
    advice = walk(
        tmp_path / "store.db", model="xl", eager_s=12e-6, compiled_s=14e-6, budget_s=300.0, of=LateSession,
        compile="block", precision="bf16_master", optimizer="adamw_triton", attention="flash_triton",
    )  # fmt: skip
    late, together = (tried for tried in advice.tried if tried.field == "block_ops")
    assert not late.kept
    assert late.waits_for_host
    assert sure(late.ratio).ratio > 1.5
    assert together.along == ("projections merged", "cuda_graph step", "update overlapped")
    assert together.kept
    assert is_the_recipe(advice.best)
    assert together.predicted_share is not None
    assert together.predicted_share == pytest.approx(1 - sure(together.ratio).ratio, abs=0.01)


def test_what_is_predicted_not_to_fit_comes_last_and_each_step_is_predicted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[StepSpec, MemoryPrediction] = {}

    def predicted(spec: StepSpec, **options: Any) -> MemoryPrediction:
        assert spec not in asked
        asked[spec] = predict_memory(spec, **options)
        return asked[spec]

    def told(spec: StepSpec) -> float | str:
        return "asked 8.00 GiB" if spec.checkpointing == "none" else planned(spec).central_s

    monkeypatch.setattr(outlook, "predict_memory", predicted)
    spec = resolve_step(
        {"model": "2.7b", "context": 2048, "batch": 16, "precision": "bf16", "attention": "auto",
         "checkpointing": "full", "steps": 30}
    )  # fmt: skip
    advice = advise(spec, store=tmp_path / "store.db", session=FakeSession(told))
    *others, last = advice.tried
    assert (last.words, last.failure) == ("checkpointing none", "out of memory: asked 8.00 GiB")
    assert "checkpointing selective" in {tried.words for tried in others if tried.kept}  # too tight to promise
    assert any((tried.predicted_share or 0.0) < 0 for tried in others)


def test_ends_that_did_not_meet_have_the_product_of_what_lies_between(behind_a_slow_host: Advice) -> None:
    overall = sure(behind_a_slow_host.overall)
    assert overall.ratio == pytest.approx(
        math.prod(tried.ratio.ratio for tried in behind_a_slow_host.kept if tried.ratio), rel=1e-9
    )
    assert "did not alternate" in behind_a_slow_host.notes[0]


def test_errors_of_chained_ratios_add_up_as_squares() -> None:
    found = chained([ratio(4.0, 2.0, "lower"), ratio(3.0, 2.7, "lower")])  # the machine was slower meanwhile
    assert (found.a, found.b, found.decision) == (4.0, 2.7, "lower")
    assert found.ratio == pytest.approx(0.45)
    assert math.log(sure(found.high) / 0.45) == pytest.approx(math.hypot(math.log(0.51 / 0.5), math.log(0.91 / 0.9)))
    without = dataclasses.replace(ratio(2.0, 1.8, "undecided"), low=None, high=None)
    assert chained([ratio(4.0, 2.0, "lower"), without]).decision == "undecided"


def test_the_pace_of_a_host_is_seen_where_the_device_waited(behind_a_slow_host: Advice) -> None:
    slow, quick = HostSession(20e-6, 33e-6), HostSession(1e-6, 1e-6)
    spec = resolve_step({"model": "large", "context": 512, "precision": "bf16", "steps": 10})
    for session, expected_s in ((slow, 20e-6), (quick, H200.rates.host.eager_s)):
        side = session.enter("start", spec)
        session.measure([side], 10)
        assert side.run is not None
        host = on_the_host_of(side.run, H200).rates.host
        assert host.eager_s == pytest.approx(expected_s, rel=0.1)
        assert host.compiled_s / host.eager_s == pytest.approx(H200.rates.host.compiled_s / H200.rates.host.eager_s)
