import gzip
import json
import lzma
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import pytest
from tests.documents import chapter_says
from tests.stored_records import stored
from tests.sure import sure

from steplab.costs.rates import gpu_named
from steplab.explain.api import DIAGNOSES, explain
from steplab.explain.fusing import FUSABLE, MOST_LEFT
from steplab.explain.shapes import product_of, shapes_of
from steplab.plan.time import compiled_shares
from steplab.reading.traces.digest import digest
from steplab.reading.traces.reading import read_trace
from steplab.records.codec import decode
from steplab.records.finding import Finding, Findings, Trial
from steplab.records.run import Run

GOLDEN = Path(__file__).parents[1] / "golden"

CASES = {
    # finding: (a profile with the fault, one without)
    "launch_bound": ("small-256-bf16-off", "2.7b-1024-fp32-off"),
    "scores_materialised": ("large-1024-fp32-off", "head dimension"),
    "fp32_matmul": ("large-1024-fp32-off", "large-1024-bf16-off"),
    "fusable_elementwise": ("large-1024-bf16-off", "large-1024-bf16-default"),
    "optimizer_not_fused": ("optimizer", "small-256-bf16-off"),
    "head_dimension": ("head dimension", "2.7b-1024-bf16-off"),
    "vocabulary_padding": ("vocabulary", "small-1024-bf16-off"),
    "loss_share": ("vocabulary", "small-1024-bf16-off"),
    "batch_too_small": ("small-256-bf16-off", "2.7b-1024-bf16-off"),
    "weight_casts": ("2.7b-256-bf16-off", "large-1024-fp32-off"),
    "compile_in_the_loop": ("growing", "small-256-bf16-default"),
    "host_copies_and_syncs": ("waiting", "small-256-bf16-off"),
    "communication_exposed": ("ddp", "waiting"),
    "fp8_casts": ("2.7b-torchao", "2.7b-fp8"),
}
FOREIGN = (
    *("copies_exposed", "data_loading", "fp64_work", "tiny_kernels"),
    *("straggler", "imbalance", "late_message", "slow_group"),
)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {cell_of(run) if run.name == "profiles" else run.name: run for run in stored("profile_h200", Run)}


@pytest.fixture(scope="module")
def in_fp8() -> dict[str, Run]:
    path = GOLDEN.parents[1] / "benchmarks" / "results" / "fp8_h100_202611.jsonl.gz"
    records = map(decode, gzip.decompress(path.read_bytes()).decode().splitlines())
    return {run.name: run for run in records if isinstance(run, Run) and run.profile}


def cell_of(run: Run) -> str:
    assert run.spec
    return f"{run.spec.model.name}-{run.spec.context}-{run.spec.precision}-{run.spec.compile}"


def found_in(run: Run) -> dict[str, Finding]:
    return {finding.kind: finding for finding in explain(run)}


def test_sizes_of_products_give_the_flops_that_were_counted(runs: dict[str, Run]) -> None:
    profiles = [run.profile for run in runs.values() if run.profile]
    ops = [op for profile in profiles for op in profile.ops if op.category == "matmul" and op.flops]
    assert {len(shapes_of(op)) for op in ops if op.name == "aten::mm"} == {2, 3}  # compiled code names the output too
    for op in ops:
        product = product_of(op)
        assert product is not None, op
        assert product.flops * op.calls == op.flops, op


def test_what_fused_attention_saves_is_predicted_of_a_compiled_step_too(runs: dict[str, Run]) -> None:
    eager, compiled = (found_in(runs[f"small-256-fp32-{how}"])["scores_materialised"] for how in ("off", "default"))
    assert eager.saves_s
    assert compiled.saves_s
    assert compiled.saves_s < eager.saves_s  # the same fused kernel, in place of fewer kernels


def test_the_most_that_compiling_left_is_of_the_steps_that_were_recorded_both_ways(runs: dict[str, Run]) -> None:
    both = [name for name in runs if name.endswith("-default") and name.replace("-default", "-off") in runs]
    most = f"{100 * MOST_LEFT.memory_bound:.0f} % of *L* and {100 * MOST_LEFT.kernels:.0f} % of the kernels"
    chapter_says("explain", f"any of {len(both)} steps that an H200 ran both ways: {most}")


def test_every_diagnosis_is_held_to_a_recorded_profile() -> None:
    assert set(CASES) == {diagnose.__name__ for diagnose in DIAGNOSES} - set(FOREIGN)


@pytest.mark.parametrize("kind", CASES)
def test_it_fires_where_the_fault_is_and_only_there(runs: dict[str, Run], in_fp8: dict[str, Run], kind: str) -> None:
    with_fault, without = CASES[kind]
    assert kind in found_in((runs | in_fp8)[with_fault])
    assert kind not in found_in((runs | in_fp8)[without])


def test_casts_by_torchao_bound_what_steplabs_would_save(in_fp8: dict[str, Run]) -> None:
    finding = found_in(in_fp8["2.7b-torchao"])["fp8_casts"]
    assert finding.saves_s == pytest.approx(61.6e-3, abs=0.1e-3)
    assert finding.at_most
    assert finding.fields == found_in(in_fp8["large-torchao"])["fp8_casts"].fields == {"precision": "fp8"}


TRIED = [
    ("small-256-bf16-off", "launch_bound"),
    ("large-1024-fp32-off", "fp32_matmul"),
    ("large-1024-fp32-off", "scores_materialised"),
    ("large-1024-fp32-off", "fusable_elementwise"),
    ("large-1024-bf16-off", "scores_materialised"),
    ("large-1024-bf16-off", "fusable_elementwise"),
    ("2.7b-1024-bf16-off", "scores_materialised"),
    ("2.7b-1024-bf16-off", "fusable_elementwise"),
    ("vocabulary", "vocabulary_padding"),
]


@pytest.mark.parametrize(("cell", "kind"), TRIED)
def test_the_predicted_gain_is_near_the_measured_one(runs: dict[str, Run], cell: str, kind: str) -> None:
    assert found_in(runs[cell])[kind].saves_s == pytest.approx(trial_of(runs[cell], kind).saved_s, rel=1 / 3)


def trial_of(run: Run, kind: str) -> Trial:
    tried = (GOLDEN / "findings_h200_202611.jsonl").read_bytes().splitlines()
    by_run = {found.run_id: found for found in (msgspec.json.decode(line, type=Findings) for line in tried)}
    [trial] = [f.trial for f in by_run[run.id].findings if f.kind == kind]
    assert trial is not None
    assert trial.saved_s is not None
    return trial


def test_the_gain_of_bf16_throughout_is_near_the_measured_one(runs: dict[str, Run]) -> None:
    """With micro-steps there can be no fp32 masters; the trial has none of them, but equal casts and kernels."""
    run, trial = runs["2.7b-1024-bf16-off"], trial_of(runs["2.7b-1024-bf16-off"], "weight_casts")
    finding = found_in(replace(run, spec=replace(sure(run.spec), accumulation=2)))["weight_casts"]
    assert finding.fields == {"precision": "bf16_pure"}
    assert finding.saves_s == pytest.approx(trial.saved_s, rel=1 / 3)


def test_what_compiling_saves_is_predicted_by_a_dry_run_of_the_step(runs: dict[str, Run]) -> None:
    saved = {cell: step_s(eager) - step_s(compiled) for cell, eager, compiled in recorded_both_ways(runs)}
    for cell in ("vocabulary", "head dimension"):
        saved[cell] = trial_of(runs[cell], "fusable_elementwise").saved_s or 0.0
    ratios = [
        finding.alone_s / saved_s
        for cell, saved_s in saved.items()
        if (finding := found_in(with_shares(runs[cell])).get("fusable_elementwise")) and finding.alone_s
    ]
    assert len(ratios) == 13
    assert median(abs(ratio - 1) for ratio in ratios) <= 0.05
    assert max(abs(ratio - 1) for ratio in ratios) <= 0.1


@pytest.mark.parametrize(("cell", "included"), [("vocabulary", "vocabulary_padding"), ("head dimension", "")])
def test_the_parts_of_what_compiling_saves_add_up(runs: dict[str, Run], cell: str, included: str) -> None:
    finding = found_in(runs[cell])["fusable_elementwise"]
    parts_s = sum(part.value for part in finding.evidence if part.unit == "s" and "save" in part.what)
    assert finding.saves_s == pytest.approx(parts_s)
    assert finding.includes == included
    if included:
        padding_s = {part.what: part.value for part in finding.evidence}["device time that matrix products save"]
        assert found_in(runs[cell])[included].saves_s == pytest.approx(padding_s, rel=0.01)


def test_what_compiling_saves_of_a_model_of_ones_own_is_predicted_by_its_profile() -> None:
    eager, compiled = stored("own_model_h200", Run)
    saved_s = step_s(eager) - step_s(compiled)
    assert found_in(eager)["fusable_elementwise"].saves_s == pytest.approx(saved_s, rel=0.05)
    assert eager.profile is not None
    low_s = left_s(compiled, FUSABLE) / left_s(eager, FUSABLE)
    assert sure(eager.profile.compiled).memory_bound == pytest.approx(low_s, abs=0.05)


def test_without_a_dry_run_the_smallest_recorded_saving_of_compiling_is_predicted(runs: dict[str, Run]) -> None:
    both = recorded_both_ways(runs)
    left = [
        (left_s(compiled, FUSABLE) / left_s(eager, FUSABLE), num_kernels(compiled) / num_kernels(eager))
        for _, eager, compiled in both
    ]
    assert len(both) == 12
    assert max(memory_bound for memory_bound, _ in left) == pytest.approx(MOST_LEFT.memory_bound, abs=0.005)
    assert max(kernels for _, kernels in left) == pytest.approx(MOST_LEFT.kernels, abs=0.005)
    for _, eager, compiled in both:
        finding = found_in(eager).get("fusable_elementwise")
        if finding and finding.saves_s:
            assert finding.saves_s <= 1.05 * (step_s(eager) - step_s(compiled))


def recorded_both_ways(runs: dict[str, Run]) -> list[tuple[str, Run, Run]]:
    pairs = ((cell, run, runs.get(cell.replace("-off", "-default"))) for cell, run in runs.items())
    return [(cell, run, compiled) for cell, run, compiled in pairs if cell.endswith("-off") and compiled]


def with_shares(run: Run) -> Run:
    shares = compiled_shares(sure(run.spec), gpu_named("H200 SXM"))
    return replace(run, profile=replace(sure(run.profile), compiled=shares))


def left_s(run: Run, categories: tuple[str, ...]) -> float:
    assert run.profile is not None
    passes = [phase.categories for phase in run.profile.phases if phase.phase in ("forward", "backward")]
    return sum(seconds.get(each, 0.0) for seconds in passes for each in categories) / run.profile.num_steps


def num_kernels(run: Run) -> float:
    assert run.profile is not None
    return sum(p.num_kernels for p in run.profile.phases if p.phase != "optimizer") / run.profile.num_steps


def step_s(run: Run) -> float:
    assert run.timing
    step = run.timing.phase("step")
    assert step
    return median(step.best_s)


def test_nothing_is_predicted_of_a_step_that_the_profiler_did_not_see(runs: dict[str, Run]) -> None:
    """The growing model computes more in its profiled steps than in all of a timed one."""
    finding = found_in(runs["growing"])["fp32_matmul"]
    assert finding.saves_s is None
    assert "not the same step" in finding.prediction


def test_idle_time_and_overlap_are_those_of_holistic_trace_analysis(tmp_path: Path) -> None:
    """Two GPUs under torch's DDP, two streams: HolisticTraceAnalysis 0.5 on the same trace, by TraceAnalysis(trace_dir,
    include_last_profiler_step=True).get_temporal_breakdown() and get_comm_comp_overlap(), with
    HTA_DISABLE_NS_ROUNDING=1.
    """
    theirs = {"idle_us": 93934.495625, "kernels_us": 147244.832156, "overlap_percent": 35.02}
    trace = tmp_path / "rank0.json"
    trace.write_bytes(lzma.decompress((GOLDEN / "excerpt_ddp_2gpu.json.xz").read_bytes()))
    assert (
        len({event["tid"] for event in json.loads(trace.read_bytes())["traceEvents"] if event["cat"] == "kernel"}) == 2
    )
    profile = digest(read_trace(trace))
    idle_s = sum(phase.idle_s + phase.host_bound_s for phase in profile.phases)
    assert profile.communication is not None
    overlap = profile.communication.overlapped_s / profile.communication.total_s
    assert profile.window_s * 1e6 == pytest.approx(theirs["kernels_us"], abs=0.01)
    assert idle_s * 1e6 == pytest.approx(theirs["idle_us"], abs=0.01)
    assert 100 * overlap == pytest.approx(theirs["overlap_percent"], abs=0.006)
