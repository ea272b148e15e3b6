import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.ddp_records import make_ddp_run
from tests.profiles import launch_bound_run, profiled_run
from tests.rendering import render_page
from tests.runs import ENVIRONMENT, make_run, out_of_memory, recorder_run
from tests.stored_records import stored

from steplab import units
from steplab.explain.api import explain
from steplab.records.disturbances import disturbances
from steplab.records.failure import Failure
from steplab.records.finding import Findings
from steplab.records.numerics import Numerics
from steplab.records.prediction import CardFit, MemoryPrediction
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.report.ddp.document import ddp_verdict
from steplab.report.kit.document import Verdict
from steplab.report.memory.document import memory_verdict
from steplab.report.plan.document import plan_document
from steplab.report.profile.verdict import finding_sentences
from steplab.report.report import Context, report_of
from steplab.report.run.cells import cells_of
from steplab.report.run.effects import effect_bars
from steplab.report.run.verdict import facts
from steplab.specs.resolve import resolve_step

NOTHING_MORE = Context()


def answer(found: Sequence[Record], context: Context = NOTHING_MORE, *, kind: str = "run") -> Verdict:
    cells = cells_of([record for record in found if isinstance(record, Run)])
    given = cells if kind == "run" else found
    return report_of(kind).verdict(given, replace(context, cells=cells))


def steps(run: Run, *samples: float) -> Run:
    return replace(
        run, timing=Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", device_s=samples),)), utilizations=()
    )


def findings(run: Run) -> Findings:
    return Findings(
        run_id=run.id, created_utc="", steplab_version="", step_s=0.1, findings=tuple(explain(run)), not_looked_at=()
    )


# --- steps --------------------------------------------------------------------------------------------------


def test_a_launch_bound_step_is_told_that_the_gpu_waits() -> None:
    late, busy = launch_bound_run(), profiled_run()
    told = answer([late], Context(findings={late.id: findings(late)}))
    assert told.sentences[0].startswith("The CPU waits for the GPU"), "a CUDA graph holds no such wait"
    assert told.sentences[1].startswith("Also (savings may overlap): The GPU waits for the CPU")
    only = replace(findings(late), findings=findings(late).findings[1:])
    first = answer([late], Context(findings={late.id: only})).sentences[0]
    assert re.search(r": (--[\w-]+ \S+ )+saves about .*, after the change for host_copies_and_syncs\.$", first)
    assert "waits for the CPU" not in answer([busy], Context(findings={busy.id: findings(busy)})).sentences[0]


def test_a_failed_step_is_not_said_to_have_nothing_to_gain() -> None:
    run = replace(profiled_run(), failure=Failure(kind="error", message="why"), profile=None)
    nothing = replace(findings(profiled_run()), findings=())
    assert list(finding_sentences(run, nothing)) == ["The run failed, so there is no step to explain."]


@pytest.mark.parametrize(
    ("after_s", "figure"), [((0.005, 0.0051, 0.0049) * 3, "50.0 % less time"), ((0.004, 0.012, 0.008) * 3, None)]
)
def test_a_gain_that_is_not_certain_has_no_figure(after_s: tuple[float, ...], figure: str | None) -> None:
    before = steps(make_run({"precision": "fp32"}), *(0.010, 0.0101, 0.0099) * 3)
    bars = effect_bars(cells_of([before, steps(make_run({"precision": "bf16"}), *after_s)]))
    assert (bars.bars[0].figure if bars else None) == figure


def test_a_step_without_a_peak_says_how_its_mfu_is_had() -> None:
    why = "no fp32 peak is known for a CPU; `steplab doctor` measures one for later runs"
    run = make_run()
    used = tuple(replace(u, peak_flops_per_s=None, value=None, peak_source=why) for u in run.utilizations)
    assert f"Its MFU is not known: {why}." in answer([replace(run, utilizations=used)], Context()).sentences
    assert "not known" not in " ".join(answer([run], Context()).sentences)


def test_bf16_that_is_slower_is_not_called_a_gain() -> None:
    fast, slow = (0.010, 0.0101, 0.0099) * 3, (0.0125, 0.0126, 0.0124) * 3
    small = [steps(make_run({"precision": precision}), *time) for precision, time in (("fp32", fast), ("bf16", slow))]
    (told,) = answer(small).sentences
    assert told.startswith("bf16 instead of fp32: slower, 1.25× the time at ")
    large = [
        steps(make_run({"precision": precision, "model": "large"}), *time)
        for precision, time in (("fp32", slow), ("bf16", fast))
    ]
    told = " ".join(answer([*small, *large]).sentences)
    assert "bf16 instead of fp32 is faster in 1 of 2 pairs of otherwise equal runs, up to 1.25× at large" in told
    assert "It does not pay in 1: 0.80× at small" in told
    both_slower = [steps(run, *slow) if run.spec and run.spec.precision == "bf16" else run for run in [*small, *large]]
    told = " ".join(answer([*both_slower[:2], steps(large[0], *fast), both_slower[3]]).sentences)
    assert "it is slower in both pairs" in told


NOISY = (0.010, 0.014, 0.008, 0.013, 0.009, 0.012, 0.011)


@pytest.mark.parametrize(("models", "said"), [(["small"], "undecided"), (["small", "medium"], "undecided in both")])
def test_a_difference_within_the_noise_is_undecided_in_each_pair(models: list[str], said: str) -> None:
    pairs = [
        steps(make_run({"precision": precision, "model": model}), *(factor * sample for sample in NOISY))
        for precision, factor in (("fp32", 1.0), ("bf16", 0.97))
        for model in models
    ]
    (told,) = answer(pairs).sentences
    assert told.startswith(f"bf16 instead of fp32: {said}")


def test_on_a_machine_that_was_busy_only_a_large_difference_is_decided() -> None:
    fast, slow = (0.010, 0.0101, 0.0099) * 3, (0.0125, 0.0126, 0.0124) * 3
    busy = replace(ENVIRONMENT, num_cpus=2, other_cpus=1.9)
    pair = [
        steps(make_run({"precision": "fp32"}), *slow),
        replace(steps(make_run({"precision": "bf16"}), *fast), environment=busy),
    ]
    (told,) = answer(pair).sentences
    assert "undecided" in told
    assert "Starts of one step differ as much there." in told
    assert "as fast" in answer([pair[0], replace(pair[1], environment=ENVIRONMENT)]).sentences[0]
    far = replace(steps(pair[1], *(sample / 4 for sample in fast)), environment=busy)
    assert re.search("(4.99|5.00)× as fast", answer([pair[0], far]).sentences[0])


def test_sizes_are_told_as_a_trend_and_not_as_the_fastest_step() -> None:
    sizes = ("small", "medium", "xl")
    runs = [steps(make_run({"model": model}), *(10.0**size,) * 6) for size, model in enumerate(sizes)]
    assert answer(runs).sentences[0] == "From small to xl the step takes 100× as long, 100 s instead of 1.00 s."
    assert "Fastest" not in render_page(runs, title="sizes")
    runs = [make_run({"model": model}) for model in sizes]
    work = answer(runs).sentences[1]
    assert re.search(r"does [\d.]+ times the model FLOPs; MFU goes from [\d.]+ % to [\d.]+ %\.", work)


def test_sizes_whose_intervals_overlap_are_no_trend() -> None:
    small, medium = (steps(make_run({"model": model}), *NOISY) for model in ("small", "medium"))
    assert answer([small, medium]).sentences == ("small takes 11.0 ms; medium takes 11.0 ms.",)


def test_of_many_unlike_runs_the_fastest_and_the_slowest_are_told() -> None:
    times = {"small": 1.0, "medium": 1.02, "large": 0.99, "xl": 1.01}
    runs = [steps(make_run({"model": model}), *(x * s for s in NOISY)) for model, x in times.items()]
    assert answer(runs).sentences == ("The fastest of 4 runs, large, takes 10.9 ms; the slowest, medium, 11.2 ms.",)


def test_the_answer_of_a_loop_without_timed_steps_says_that_there_are_none() -> None:
    loop = replace(recorder_run(timing=None), notes=("step time: the loop ran 3 steps, but 5 are warm-up",))
    assert answer([loop]).sentences == ("No step was timed: the loop ran 3 steps, but 5 are warm-up.",)
    nothing = Findings(run_id=loop.id, created_utc="", steplab_version="", step_s=None, findings=())
    assert tuple(finding_sentences(loop, nothing)) == (
        "No step was timed and none was profiled, so there is nothing to explain.",
    )


def test_an_impossible_mfu_is_a_warning_and_no_answer() -> None:
    why = "MFU and HFU over 100 %: the ceiling is too low"
    runs = []
    for size, model in enumerate(("small", "medium")):
        made = make_run({"model": model})
        run = steps(made, *(10.0**size,) * 6)
        used = tuple(replace(u, value=3.4) for u in made.utilizations)
        runs.append(replace(run, utilizations=used, notes=(*run.notes, why)))
    for told in (answer(runs), answer(runs[:1])):
        assert "%" not in " ".join(told.sentences).replace("95 %", "")
        assert any(caution.startswith(f"Warning: {why}") for caution in told.cautions)
    assert "MFU, the highest" not in render_page(runs, title="t")


def test_mfu_of_another_peak_is_no_lower_one() -> None:
    runs = [run for run in stored("precision_h200", Run) if run.id in ("b11fba59a313", "f6693b1bef11")]
    told = next(fact for fact in facts(cells_of(runs)) if "MFU" in fact.text)
    assert f"{told.figure} {told.text}" == (
        "42.0 % MFU, the highest, of a dense fp32 peak of 67.0 TFLOP/s (fp32); "
        "7.9 %, the highest of tf32's 494 TFLOP/s (tf32)"
    )


def test_the_highest_rate_is_of_a_run_without_a_warning_if_there_is_one() -> None:
    small, large = (steps(make_run({"model": model}), *(0.1,) * 12) for model in ("small", "large"))
    fast = steps(large, *(0.001 if n % 2 else 0.05 for n in range(12)))
    assert disturbances(fast)
    assert not disturbances(small)

    def highest(*runs: Run) -> str:
        return next(f"{fact.figure}{fact.text}" for fact in facts(cells_of(runs)) if "tokens/s" in fact.text)

    rate = units.format_rate((small.tokens_per_step or 0) / 0.1, "")
    assert highest(small, fast) == f"{rate}tokens/s, the highest without a warning (small)"
    assert highest(small, steps(large, *(0.2,) * 12)) == f"{rate}tokens/s, the highest (small)"
    assert highest(fast, replace(fast, id="other")).endswith("tokens/s, the highest (large)")


def test_the_rate_of_a_layout_is_of_all_its_gpus() -> None:
    runs = [make_run({"layout": "dp=4", "model": model}) for model in ("small", "large")]
    assert re.search(r"That is [\d.]+ k tokens/s on 4 GPUs;", " ".join(answer(runs[:1]).sentences))
    assert any(fact.text.startswith("tokens/s on 4 GPUs, the highest") for fact in facts(cells_of(runs)))
    assert "GPUs" not in " ".join(answer([make_run()]).sentences)


def test_too_few_samples_have_a_range_and_no_interval() -> None:
    few, many = steps(make_run(), 0.1, 0.11, 0.12), steps(make_run(), *(0.1 + 0.001 * n for n in range(10)))
    assert "range 100 ms to 120 ms, n = 3" in answer([few]).sentences[0]
    assert "95 % interval" not in answer([few]).sentences[0]
    assert "95 % interval" in answer([many]).sentences[0]


@pytest.mark.parametrize("command", ["run", "profile"])
def test_a_disturbed_measurement_is_repeated_by_the_command_that_made_it(command: str) -> None:
    measured = make_run(environment=replace(ENVIRONMENT, load_average=40.0))
    one = replace(measured, profile=profiled_run().profile if command == "profile" else None)
    (repeat,) = (text for text in answer([one]).cautions if text.startswith("Repeat it"))
    assert f": steplab {command} --model " in repeat


@pytest.mark.parametrize("busy", [True, False])
def test_a_noisy_machine_stands_beside_the_step_time(busy: bool) -> None:
    environment = replace(ENVIRONMENT, load_average=40.0 if busy else 0.5)
    told = answer([make_run(environment=environment)]).cautions
    assert any("40.0 processes were runnable on 16 processors" in text for text in told) == busy
    page = render_page([make_run(environment=environment)], title="x").replace("\u00a0", " ")
    assert ('<p class="warning">Warning: 40.0 processes' in page) == busy
    if busy:
        assert page.index('<p class="warning">') < page.index("<main>")


def test_what_failed_is_said_and_that_it_was_measured_is_not() -> None:
    told = answer([out_of_memory({"model": "xl"})])
    assert told.sentences == ("out of memory: asked 8.00 GiB.",)
    assert "A step takes" not in " ".join(told.sentences)


def test_own_loops_are_not_compared() -> None:
    told = " ".join(answer([recorder_run(id="a"), recorder_run(id="b", name="another")]).sentences)
    assert "grows" not in told
    assert "instead of" not in told


# --- memory -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memories() -> dict[str, Run]:
    return {run.name: run for run in stored("memory_h200", Run)}


@pytest.mark.parametrize(
    ("size", "direction"), [("2.7b-512-train", "higher"), ("small-512-train", "lower")], ids=["higher", "lower"]
)
def test_the_direction_in_which_autocast_moves_the_peak_is_the_measured_one(
    memories: dict[str, Run], size: str, direction: str
) -> None:
    bf16, fp32 = memories[f"{size}-bf16"], memories[f"{size}-fp32"]
    told = " ".join(memory_verdict(bf16, references=(fp32,)).sentences)
    assert re.findall(r"With bf16 the peak is [\d.]+ % (\w+) than the", told) == [direction]


# --- attention, collectives, data parallelism ---------------------------------------------------------------


def test_one_variant_alone_has_no_shortest_step() -> None:
    run = make_ddp_run()
    only = replace(run, cells=tuple(cell for cell in run.cells if cell.contender.kind == "none"))
    (sentence,) = ddp_verdict(only).sentences
    assert sentence.startswith("Only one variant was measured: no communication, ")


# --- precision, plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "scaled"), [("fp16", True), ("bf16", False)])
def test_the_loss_is_scaled_where_gradients_underflow(precision: str, scaled: bool) -> None:
    audits = stored("precision_h200", Numerics)
    audit = next(r for r in audits if r.spec and (r.spec.precision, r.spec.model.name) == (precision, "small"))
    _, second, *_ = answer([audit], kind="numerics").sentences
    assert second.startswith("Scale the loss by 131072" if scaled else "The loss needs no scale")


def test_a_plan_says_first_whether_the_step_fits() -> None:
    def card(gpu: str, verdict: str) -> CardFit:
        return CardFit(gpu=gpu, usable_bytes=2**34, usable_is_known=True, verdict=verdict)  # type: ignore[arg-type]

    cards = (card("A", "fits"), card("B", "fits"), card("C", "does not fit"))
    prediction = MemoryPrediction(
        peak_bytes=2**30, at_peak={"activations": 2**30}, peak_phase="backward", peak_where="somewhere", terms=(),
        cards=cards,
    )  # fmt: skip
    told = plan_document(resolve_step({"model": "small"}), prediction)
    assert told.verdict.sentences[0] == "The step fits on A, B; does not fit on C."
    assert told.verdict.sentences[1].startswith("The peak is 1.00 GiB")
    assert told.sections[0].title == "GPUs"
    many = (*(card(gpu, "fits") for gpu in "ABCDE"), *(card(gpu, "does not fit") for gpu in "FGHIJK"))
    told = plan_document(resolve_step({"model": "small"}), replace(prediction, cards=many))
    assert told.verdict.sentences[0] == (
        "The step fits on 5 known GPUs (smallest: E); does not fit on 6 known GPUs (largest: F)."
    )
