import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.runs import ENVIRONMENT, make_run, out_of_memory, recorder_run
from tests.stored_records import stored
from tests.sure import sure

import steplab
from steplab.comparison.comparing import compare
from steplab.comparison.samples import FEWEST
from steplab.errors import Inconclusive, UserError
from steplab.records.comparison import ComparedFigure, Comparison, Side
from steplab.records.memory_profile import Allocation
from steplab.records.profile import KernelStats
from steplab.records.record import Record
from steplab.records.rows import run_cells
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing, Turn, Turns
from steplab.report.compare.document import compare_document
from steplab.report.compare.words import kernel_words, memory_words, verdict
from steplab.report.kit.document import Bars
from steplab.report.kit.rendering import render
from steplab.report.turns.document import turns_document


def compared(a: Record | Sequence[Record], b: Record | Sequence[Record], **options: Any) -> Comparison:
    sides = [[side] if isinstance(side, Record) else list(side) for side in (a, b)]
    before, after = (Side(told=name, ids=tuple(r.id for r in side)) for name, side in zip("AB", sides, strict=True))
    return compare(before, after, *sides, **options)


def figure(comparison: Comparison, name: str) -> ComparedFigure:
    [found] = [figure for figure in comparison.figures if figure.name == name]
    return found


def slower(run: Run, factor: float) -> Run:
    assert run.timing is not None
    phases = [
        replace(phase, device_s=tuple(factor * s for s in phase.best_s), host_s=None)
        for phase in run.timing.back_to_back
    ]
    return replace(run, id="b" * 12, timing=replace(run.timing, back_to_back=tuple(phases)))


STEADY = make_run({"steps": "30"})
SAMPLES = [s for cell in run_cells(STEADY) for f in cell.figures if f.name == "step time" for s in f.samples]


# --- times ------------------------------------------------------------------------------------------------


def test_a_side_is_called_by_the_name_that_its_records_have() -> None:
    runs = [make_run({"context": 64}, seed=seed, id=f"id{seed}", name=name) for seed, name in enumerate(("old", "new"))]
    text = render(compare_document(steplab.compare(*runs)))
    assert text.splitlines()[0] == "'new', id1 (B) against 'old', id0 (A)"
    assert "1 record ('new': id1)" in text


def test_a_run_is_no_different_from_itself() -> None:
    found = compared(STEADY, STEADY)
    assert found.outcome == "fine"
    assert verdict(found).sentences[0] == "A and B are the same records, so nothing can differ."
    assert not verdict(found).cautions


def test_a_slower_step_is_a_regression_with_its_interval_and_phases() -> None:
    found = compared(STEADY, slower(STEADY, 1.1))
    step = figure(found, "step time")
    assert found.outcome == "regression"
    assert found.regressions == (step,)
    assert sure(step.ratio).ratio == pytest.approx(1.1)
    assert step.b == pytest.approx(1.1 * step.a)
    assert figure(found, "backward").b == pytest.approx(1.1 * figure(found, "backward").a)
    assert figure(found, "tokens per second").b == pytest.approx(figure(found, "tokens per second").a / 1.1)
    assert figure(found, "MFU (causal)").b == pytest.approx(figure(found, "MFU (causal)").a / 1.1)
    assert verdict(found).sentences[0].startswith("B is worse: step time ")
    better = compared(slower(STEADY, 1.1), STEADY)
    assert better.outcome == "fine"
    (told,) = verdict(better).sentences
    assert told.startswith("B is better: step time ")
    assert told.endswith("; peak allocated no worse."), "its MFU and compile time do not decide"


def test_a_difference_between_single_processes_needs_a_threshold_or_further_runs() -> None:
    assert compared(STEADY, slower(STEADY, 1.03)).outcome == "fine"
    assert compared(STEADY, slower(STEADY, 1.03), threshold=0.01).outcome == "regression"
    runs = [make_run({"steps": "30"}, seed=seed, id=f"{seed:012x}") for seed in range(6)]
    assert compared(runs, [slower(run, 1.03) for run in runs]).outcome == "regression"


def test_too_few_steps_are_undecided_and_say_how_many_more_would_do() -> None:
    found = compared(make_run({"steps": "3"}, seed=1), make_run({"steps": "3"}, seed=2))
    assert found.outcome == "undecided"
    assert "about 3 more samples of each side would decide" in verdict(found).sentences[0]


def test_identical_runs_on_an_overloaded_machine_decide_nothing() -> None:
    runs = stored("noisy_cpu", Run)
    assert len(runs) == 16
    outcomes = {compared(a, b).outcome for a, b in itertools.pairwise(runs)}
    assert outcomes == {"undecided"}
    assert "alternate A and B" in verdict(compared(*runs[:2])).cautions[-1]


def in_turns(samples: Sequence[float], factor: float) -> tuple[Run, Run]:
    def side(letter: str, factor: float, shift: int) -> Run:
        step = PhaseSamples(phase="step", device_s=tuple(factor * s for s in samples))
        places = tuple(Turn(place=4 * place + shift, steps=3) for place in range(len(samples) // 3))
        turns = Turns(session="s", label=letter, turns=places)
        return replace(STEADY, id=letter * 12, timing=Timing(warmup=(), back_to_back=(step,)), turns=turns)

    return side("a", 1.0, 0), side("b", factor, 1)


def test_runs_that_took_turns_are_compared_turn_by_turn() -> None:
    drift = [1.3 if 9 <= step < 21 else 1.0 for step in range(30)]
    found = compared(*in_turns([d * s for d, s in zip(drift, SAMPLES, strict=True)], 1.03))
    assert found.in_turns
    assert found.outcome == "regression"
    assert found.regressions[0].ratio is not None
    assert found.regressions[0].ratio.ratio == pytest.approx(1.03)
    assert verdict(found).cautions == ()
    text = " ".join(render(compare_document(found), "table", width=120).split())
    assert "the ratio may differ from the quotient of the step times" in text


def test_the_exact_peak_beside_a_step_time_does_not_take_part_in_its_doubt() -> None:
    found = compared(*in_turns(SAMPLES[:18], 1.1))
    assert [figure.name for figure in found.deciding] == ["step time", "peak allocated"]
    assert found.outcome == "regression"


# --- likeness ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"spec": make_run({"batch": "8"}).spec}, "batch", "4 in A, 8 in B"),
        ({"spec": make_run({"precision": "bf16"}).spec}, "precision", "fp32 in A, bf16 in B"),
        ({"environment": replace(ENVIRONMENT, torch="2.13.0")}, "torch", "2.11.0+cu130 in A, 2.13.0 in B"),
        ({"environment": replace(ENVIRONMENT, driver=None)}, "driver", "580.65 in A only"),
        (
            {"environment": replace(ENVIRONMENT, device=replace(ENVIRONMENT.device, name="NVIDIA B200"))},
            "device",
            "NVIDIA H200 in A, NVIDIA B200 in B",
        ),
        ({"steplab_version": "0.9.0"}, "steplab", "0.1.0 in A, 0.9.0 in B"),
    ],
)
def test_unlike_runs_are_refused_by_the_field_unless_it_is_allowed(
    change: dict[str, Any], field: str, values: str
) -> None:
    other = replace(STEADY, **change)
    with pytest.raises(Inconclusive, match=f"{field}: {values.replace('+', '.')}; .*--allow {field}") as refused:
        compared(STEADY, other)
    assert refused.value.exit_code == 3
    allowed = compared(STEADY, other, allow=[field])
    assert [found.field for found in allowed.allowed] == [field]


def test_a_field_that_is_no_field_is_not_allowed_to_differ() -> None:
    with pytest.raises(UserError, match=r"--allow torhc: no such field; did you mean torch\?"):
        compared(STEADY, STEADY, allow=["torhc"])
    assert compared(STEADY, STEADY, allow=["torch", "NCCL_ALGO"]).outcome == "fine"


def test_how_a_step_was_measured_and_which_of_equal_devices_was_used_may_differ() -> None:
    environment = replace(ENVIRONMENT, variables={"CUDA_VISIBLE_DEVICES": "1"}, git_commit="5e6f7a8")
    other = make_run({"steps": "20", "seed": "3"}, environment=environment)
    assert compared(STEADY, other).allowed == ()


def test_a_shorter_step_of_fewer_tokens_is_no_better_without_its_rate() -> None:
    before, after = make_run({"context": "512", "steps": "30"}), make_run({"context": "128", "steps": "30"})
    answer, differing, rate = verdict(compared(before, after, allow=["context"])).sentences
    assert answer.startswith("B costs less, with 0.25× the tokens a step: step time ")
    assert differing == "They differ in context: 512 in A, 128 in B."
    assert rate.startswith("Throughput: tokens per second ")
    other = verdict(compared(STEADY, replace(STEADY, id="f" * 12, steplab_version="0.9.0"), allow=["steplab"]))
    assert other.sentences[1:] == ("They differ in steplab: 0.1.0 in A, 0.9.0 in B.",)
    assert "tokens" not in other.sentences[0]


@pytest.mark.parametrize("precision", ["fp8", "fp8_torchao"])
def test_fp8_on_one_side_is_a_change_of_numbers(precision: str) -> None:
    masters, in_fp8 = (
        make_run({"steps": "20", "optimizer": "adamw_triton", "precision": each}) for each in ("bf16_master", precision)
    )
    told = f"{precision} changes the numbers: products of linear layers within blocks take fp8"
    assert verdict(compared(masters, in_fp8, allow=["precision"])).cautions[0].startswith(told)
    assert not any("numbers" in each for each in verdict(compared(in_fp8, slower(in_fp8, 1.1))).cautions)
    labels = [
        replace(run, turns=Turns(label=label, session="s")) for run, label in zip((masters, in_fp8), "AB", strict=True)
    ]
    assert told in " ".join(render(turns_document([labels], [[None]], ["", ""])).split())


def test_cells_of_two_studies_are_paired_by_what_they_measure() -> None:
    cells = [make_run({"context": c, "steps": "30"}) for c in ("128", "256", "512")]
    later = [cells[0], slower(cells[1], 1.2)]
    found = compared(cells, later)
    assert {figure.cell for figure in found.regressions} == {figure.cell for figure in found.figures[-9:]}
    assert "B is worse in 1 of 2 cells" in verdict(found).sentences[0]
    assert "context 512" in found.notes[0]


def test_cells_that_an_allowed_field_alone_tells_apart_are_not_mixed() -> None:
    study = [make_run({"batch": batch}) for batch in ("4", "8")]
    with pytest.raises(UserError, match="several cells that differ only in batch"):
        compared(study, make_run({"batch": "16"}), allow=["batch"])


def test_a_cell_that_fails_in_b_alone_is_a_regression() -> None:
    found = compared(STEADY, out_of_memory())
    assert found.outcome == "regression"
    assert "B failed: out of memory" in verdict(found).sentences[0]
    assert compared(out_of_memory(), out_of_memory()).outcome == "undecided"


def test_a_comparison_notes_failed_records_beside_successful_ones() -> None:
    failed = [out_of_memory({"steps": "30"}, id=digit * 12) for digit in "cd"]
    found = compared(STEADY, [slower(STEADY, 1.0), *failed])
    assert found.failed == ()
    (note,) = found.notes
    assert note.startswith("2 of 3 records failed in B; the others are compared: out of memory")
    assert note in " ".join(render(compare_document(found)).split())


def test_a_loop_of_the_users_own_is_compared_by_its_phases() -> None:
    found = compared(recorder_run(), recorder_run())
    assert found.outcome == "fine"
    assert {figure.name for figure in found.figures} >= {"step time", "load batch", "update"}


def test_turns_are_advised_only_for_what_can_be_run_again() -> None:
    (of_steps,), (of_loops,) = (verdict(compared(run, slower(run, 1))).cautions for run in (STEADY, recorder_run()))
    assert of_steps.endswith("alternate A and B with `steplab ab`.")
    assert of_loops.endswith(
        f"measure each side in {'six' if FEWEST == 6 else FEWEST} processes or more, all under one name."
    )


# --- explanations -----------------------------------------------------------------------------------------


def profiled() -> Run:
    return next(run for run in stored("profile_h200", Run) if run.profile and run.timing)


def test_a_kernel_that_is_no_longer_fused_is_named_with_its_time_and_its_place() -> None:
    run = profiled()
    profile = sure(run.profile)
    fused = KernelStats(
        name="layer_norm_backward_kernel",
        category="normalisation",
        phase="backward",
        range="blocks.*.norm",
        stream=7,
        calls=24 * profile.num_steps,
        total_s=0.002 * profile.num_steps,
        median_s=1e-4,
        max_s=1e-4,
    )
    parts = [
        replace(fused, name=f"vectorized_elementwise_kernel<{part}>", total_s=0.0017 * profile.num_steps)
        for part in ("mul", "rsqrt", "sum")
    ]
    a, b = (
        replace(run, profile=replace(profile, kernels=(*profile.kernels, *kernels))) for kernels in ([fused], parts)
    )
    change = compared(a, b).kernels[0]
    assert change.a_s == pytest.approx(0.002)
    assert change.b_s == pytest.approx(0.0051)
    words = kernel_words(change)
    assert words.startswith("+3.10 ms per step in backward of blocks.*.norm: ")
    assert "instead of layer_norm_backward_kernel (24 calls, 2.00 ms), no longer fused" in words
    assert "now fused" in kernel_words(compared(b, a).kernels[0])
    assert compared(a, a).kernels == ()


def test_a_phase_and_a_category_of_kernels_of_one_name_are_two_figures() -> None:
    run = profiled()
    optimizer = sure(sure(run.timing).phase("optimizer"))
    cells = {(f.group, f.name): f for cell in run_cells(run) for f in cell.figures}
    found = {(f.group, f.name): f for f in compared(run, slower(run, 1.1)).figures}
    phase, kernels = found["phase", "optimizer"], found["kernels", "optimizer"]
    assert sure(phase.ratio).num_a == len(optimizer.best_s)
    assert phase.b == pytest.approx(1.1 * phase.a)
    assert kernels.a == kernels.b == cells["kernels", "optimizer"].samples[0]
    assert kernels.ratio is None


def test_the_answer_names_where_time_changed_and_leaves_the_kernels_to_their_section() -> None:
    run = profiled()
    assert run.profile is not None
    planted = replace(run.profile.kernels[0], name="planted_kernel", total_s=0.1 * run.profile.num_steps)
    without_ranges = [replace(kernel, range="") for kernel in (*run.profile.kernels, planted)]
    other = replace(run, id="b" * 12, profile=replace(run.profile, kernels=tuple(without_ranges)))
    document = compare_document(compared(run, other))
    answer = " ".join(document.verdict.sentences)
    assert f"+100 ms per step in {planted.phase}, category {planted.category}" in answer
    assert "planted_kernel" not in answer
    assert "planted_kernel" in render(document, "md").replace("\\_", "_")


def test_an_allocation_that_is_planted_is_named_with_its_shape_and_format() -> None:
    run = stored("memory_h200", Run)[0]
    profile = sure(run.memory_profile)

    def with_logits(dtype: str, num_bytes: int) -> Run:
        logits = Allocation(
            requested_bytes=num_bytes,
            block_bytes=num_bytes,
            category="activations",
            module="head.7.loss",
            op="aten::_to_copy",
            shape=(4, 512, 10000),
            dtype=dtype,
            at_peak=True,
        )
        held = profile.at_peak | {"activations": profile.at_peak["activations"] + num_bytes}
        grown = replace(
            profile, largest=(logits, *profile.largest), at_peak=held, peak_bytes=profile.peak_bytes + num_bytes
        )
        return replace(run, memory_profile=grown)

    size = 4 * 512 * 10000
    found = compared(with_logits("bfloat16", 2 * size), with_logits("float32", 4 * size))
    assert memory_words(found.memory[0]) == (
        "+39.1 MiB of activations: [4, 512, 10000] of head.*.loss, float32 instead of bfloat16"
    )
    assert figure(found, "activations").b - figure(found, "activations").a == 2 * size
    assert "in B alone" in memory_words(compared(run, with_logits("float32", 4 * size)).memory[0])


# --- benchmarks and formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_benchmark, make_comm, make_ddp_run])
def test_benchmarks_are_compared_cell_by_cell(make: Any) -> None:
    record = make()
    found = compared(record, dataclasses.replace(record, id="b" * 12))
    assert len({figure.cell for figure in found.figures}) > 1
    assert not found.regressions
    assert all(figure.a == figure.b for figure in found.figures)


def test_the_page_begins_with_what_decides_and_explains_its_columns_once() -> None:
    document = compare_document(compared(STEADY, slower(STEADY, 1.1)))
    (bars,) = (block for section in document.sections for block in section.blocks if isinstance(block, Bars))
    assert [bar.strong for bar in bars.bars] == sorted((bar.strong for bar in bars.bars), reverse=True)
    assert bars.bars[0].label == "step time"
    colors = {bar.label: bar.segments[0].color for bar in bars.bars}
    words = {color: text for color, _, text in bars.legend}
    assert words[colors["step time"]] == words[colors["tokens per second"]] == "B is worse"
    text = render(document, "table", width=120)
    assert text.count("bootstrapped") == text.count("Mann-Whitney") == 1
