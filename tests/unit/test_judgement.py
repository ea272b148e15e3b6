import dataclasses
import gzip
import itertools
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runs import make_run
from tests.sure import sure

from steplab.comparison.comparing import compare
from steplab.comparison.turns import judged
from steplab.errors import Inconclusive, SteplabError, UserError
from steplab.records.codec import decode, new_id
from steplab.records.comparison import Side
from steplab.records.disturbances import disturbances
from steplab.records.rows import run_row, step_key
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing, Turn, Turns
from steplab.report.run.cells import cells_of
from steplab.report.run.effects import effect_words, effects_of
from steplab.report.run.verdict import runs_verdict
from steplab.stats import percentile

REPOSITORY = Path(__file__).parents[2]


def _runs(file: Path) -> Iterator[Run]:
    unpack = lzma.decompress if file.suffix == ".xz" else gzip.decompress
    for line in unpack(file.read_bytes()).splitlines():
        try:
            record = decode(line)
        except SteplabError:
            continue
        if isinstance(record, Run) and record.samples_s:
            yield dataclasses.replace(record, profile=None, memory_profile=None)


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Run]]:
    files = [*REPOSITORY.glob("tests/golden/*.jsonl.*z"), *REPOSITORY.glob("benchmarks/results/*.jsonl.gz")]
    return {file.name: list(_runs(file)) for file in sorted(files)}


def run_of(recorded: dict[str, list[Run]], beginning: str) -> Run:
    return next(run for runs in recorded.values() for run in runs if run.id.startswith(beginning))


def test_page_and_compare_never_contradict_each_other(recorded: dict[str, list[Run]]) -> None:
    asked, contradictions = 0, []
    for runs in recorded.values():
        for effect in effects_of(cells_of(runs)):
            for pair in effect.pairs[::3]:
                starts = [[cell.run for cell in side] for side in zip(*pair.starts, strict=True)]
                a, b = (Side(told=side[0].id, ids=tuple(run.id for run in side)) for side in starts)
                try:
                    found = compare(a, b, *starts, allow=[effect.field])
                except (Inconclusive, UserError):
                    continue
                [decision] = [each.ratio.decision for each in found.figures if each.name == "step time" and each.ratio]
                asked += 1
                if decision != pair.decision:
                    contradictions.append((pair.before.id, pair.after.id, pair.decision, decision))
    assert asked > 30
    assert contradictions == []


def test_half_the_time_is_decided_on_all_records_but_those_of_an_overloaded_cpu(recorded: dict[str, list[Run]]) -> None:
    for run in (run for runs in recorded.values() for run in runs if len(run.samples_s) >= 10 and not run.turns):
        assert run.timing is not None
        step = sure(run.timing.phase("step"))
        half = dataclasses.replace(step, device_s=None, host_s=tuple(sample / 2 for sample in step.best_s))
        phases = tuple(half if phase is step else phase for phase in run.timing.back_to_back)
        faster = dataclasses.replace(run, id="half", timing=dataclasses.replace(run.timing, back_to_back=phases))
        ratio = sure(judged(run, faster))
        overloaded = "busy machine" in {each.word for each in disturbances(run)}
        restless = percentile(run.samples_s, 90) > 2 * percentile(run.samples_s, 10)
        assert ratio.decision == "lower" or overloaded or restless, (run.id, ratio)


@pytest.mark.parametrize(("a", "b"), [("b051fafb4fc7", "f07c525645e0")])
def test_a_difference_far_beyond_the_noise_of_starts_is_decided(a: str, b: str, recorded: dict[str, list[Run]]) -> None:
    before, after = run_of(recorded, a), run_of(recorded, b)
    ratio = sure(judged(before, after))
    assert ratio.decision == "lower"
    assert any(disturbances(run) for run in (before, after))


def test_starts_of_one_step_are_not_told_apart(recorded: dict[str, list[Run]]) -> None:
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run in (run for runs in recorded.values() for run in runs if len(run.samples_s) >= 10):
        if run.spec and run.environment:
            key = (*step_key(run.spec).values(), run.device_name, run.environment.torch)
            alike.setdefault(key, []).append(run)
    pairs = [pair for some in alike.values() for pair in itertools.combinations(some, 2)]
    ratios = [ratio for pair in pairs if (ratio := judged(*pair))]
    assert len(ratios) > 200
    assert sum(ratio.decision in ("lower", "higher") for ratio in ratios) <= 0.01 * len(ratios)


def test_a_record_has_one_figure_of_tokens_per_second(recorded: dict[str, list[Run]]) -> None:
    runs = [run for some in recorded.values() for run in some if run.tokens_per_step and len(run.samples_s) % 2 == 0]
    assert runs
    for run in runs[:40]:
        side = Side(told=run.id, ids=(run.id,))
        found = {each.name: each for each in compare(side, side, [run], [run]).figures}
        assert found["tokens per second"].a == pytest.approx(run_row(run)["tokens_per_s"], rel=1e-12)


def test_a_page_of_a_busy_machine_begins_with_what_is_known(recorded: dict[str, list[Run]]) -> None:
    verdict = runs_verdict(cells_of(recorded["busy_cpu_202611.jsonl.gz"]))
    told = "with one thread 4 of 6 steps are faster, up to 40.5×: set OMP_NUM_THREADS=1."
    assert f"While other processes keep processors busy, {told}" in verdict.sentences
    (doubt,) = verdict.cautions
    assert doubt.startswith("Warning: the step time of 6 of 6 runs is doubtful (")


def two_starts(after: tuple[float, float]) -> list[Run]:
    made = []
    for number, ratio in enumerate(after):
        for shift, (precision, factor) in enumerate((("fp32", 1.0), ("bf16", ratio))):
            turns = tuple(Turn(place=4 * place + shift, steps=1) for place in range(12))
            samples = tuple(0.1 * factor * (1 + 0.001 * (place % 3)) for place in range(12))
            timing = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", device_s=samples),))
            turned = Turns(session=f"start {number}", label=precision, turns=turns)
            made.append(make_run({"precision": precision}, id=new_id(), timing=timing, turns=turned))
    return made


def test_starts_of_one_comparison_in_turns_are_one_pair_and_decided_together() -> None:
    for after, expected in (((0.80, 0.81), "lower"), ((0.80, 1.20), "undecided")):
        runs = two_starts(after)
        [effect] = effects_of(cells_of(runs))
        [pair] = effect.pairs
        assert len(pair.starts) == 2
        assert pair.decision == expected
        assert pair.judged.ratio == pytest.approx((after[0] * after[1]) ** 0.5, rel=1e-3)
        sides = [runs[0::2], runs[1::2]]
        a, b = (Side(told="side", ids=tuple(run.id for run in side)) for side in sides)
        figures = {each.name: each for each in compare(a, b, *sides, allow=["precision"]).figures}
        assert figures["step time"].ratio == pair.judged


def test_the_most_that_a_choice_gains_is_that_of_a_decided_pair() -> None:
    decided = [
        make_run({"precision": p}, id=new_id(), timing=steady_at(s)) for p, s in (("fp32", 0.120), ("bf16", 0.1))
    ]
    few = [
        make_run({"precision": p, "model": "large"}, id=new_id(), timing=steady_at(s, 2))
        for p, s in (("fp32", 0.3), ("bf16", 0.1))
    ]
    [effect] = effects_of(cells_of([*decided, *few]))
    assert [pair.decision for pair in effect.pairs] == ["lower", "undecided"]
    assert "faster in 1 of 2 pairs of otherwise equal runs, up to 1.20× at small" in effect_words(effect)[0]
    assert effect.pairs[0].interval == pytest.approx((1.2, 1.2), rel=0.01)
    assert effect.pairs[1].interval is None


def steady_at(step_s: float, count: int = 20) -> Timing:
    samples = tuple(step_s * (1 + 0.001 * (place % 3)) for place in range(count))
    return Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", device_s=samples),))
