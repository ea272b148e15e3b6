import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.runs import ENVIRONMENT, make_run, out_of_memory, recorder_run
from tests.stored_records import stored
from tests.sure import sure
from tests.unit.explaining import BYTES_PER_S, MS, foreign, host_call, op, own, profile, timing

from steplab.costs.kernel_time import Product, product_s, streaming_s
from steplab.explain import api
from steplab.explain.api import DIAGNOSES, WITHOUT_PROFILE, explain, not_looked_at
from steplab.explain.case import gpu_of_run
from steplab.explain.shapes import Shape, shapes_of
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.finding import Finding
from steplab.records.profile import CATEGORIES, PHASES, Communication, CompiledShares, OpStats
from steplab.records.run import ModelFacts, Run
from steplab.specs.resolve import command, resolve_step, with_fields

SLOW = [
    op("aten::mm", "matmul", 50.0, dtype="fp32", flops=2e12, moved=1e9),
    op("aten::mul_", "elementwise", 8.0, phase="optimizer", calls=300),
]
CEILINGS = Ceilings(
    id="cccccccccccc",
    created_utc="2026-11-21T07:00:00Z",
    steplab_version="0.1.0",
    environment=dataclasses.replace(
        ENVIRONMENT, device=dataclasses.replace(ENVIRONMENT.device, name="NVIDIA Unheard-of")
    ),
    ceilings=(
        Ceiling(name="matmul", dtype="fp32", unit="FLOP/s", work=1e12, seconds=(0.06, 0.05)),
        Ceiling(name="matmul", dtype="tf32", unit="FLOP/s", work=1e12, seconds=(0.01, 0.011)),
        Ceiling(name="copy", dtype=None, unit="B/s", work=1e10, seconds=(0.02, 0.01)),
    ),
)


def unheard_of(run: Run) -> Run:
    return dataclasses.replace(run, environment=CEILINGS.environment)


def slow_run() -> Run:
    fields = {"model": "small", "precision": "fp32", "optimizer": "adamw_loop"}
    run = own(fields, profile(SLOW), timing(60.0, optimizer=8.0))
    return dataclasses.replace(run, model=ModelFacts(num_parameters=100_000_000))


def test_the_largest_gain_comes_first_and_what_cannot_be_said_last() -> None:
    run = slow_run()
    odd = dataclasses.replace(run, spec=with_fields(sure(run.spec), {"attention": "sdpa", "model.num_heads": "64"}))
    found = explain(odd)
    assert [f.kind for f in found] == ["fp32_matmul", "optimizer_not_fused", "head_dimension"]
    saves = [f.saves_s for f in found]
    assert saves[0] is not None
    assert saves[1] is not None
    assert saves[0] > saves[1]
    assert saves[2] is None


def test_a_saving_that_another_includes_is_deducted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def saving(kind: str, ms: float, includes: str = "") -> Finding:
        return Finding(kind=kind, title="", saw="", why="", change="", evidence=(), saves_s=ms * MS, includes=includes)

    of_60_ms = (saving("whole", 40.0, "part"), saving("part", 15.0), saving("third", 12.0), saving("fourth", 10.0))
    monkeypatch.setattr(api, "DIAGNOSES", tuple(lambda _, one=one: one for one in of_60_ms))
    assert {f.kind: sure(f.saves_s) for f in explain(slow_run())} == pytest.approx(
        {"whole": 40 * MS, "part": 15 * MS, "third": 12 * MS, "fourth": 8 * MS}
    )


def test_a_failed_run_is_not_explained_and_that_is_said() -> None:
    failed = out_of_memory({"model": "2.7b", "attention": "sdpa"})
    assert explain(failed) == []
    assert not_looked_at(failed) == ("the run failed (out of memory): there is no step to explain",)


def test_what_a_profile_would_add_is_said_with_the_command() -> None:
    run = make_run({"model": "small", "context": 256})
    [gap] = not_looked_at(run)
    assert "launch_bound" in gap
    assert "optimizer_not_fused" not in gap
    assert "`steplab profile --model small --context 256`" in gap
    [gap] = not_looked_at(recorder_run())
    assert "import-trace" in gap
    assert not_looked_at(slow_run())[0].startswith("the trace has no shapes")


def test_what_is_missing_of_a_damaged_trace_is_said_first() -> None:
    gaps = not_looked_at(foreign(profile(SLOW, doubts=("the file ends early",), notes=("the file ends early",))))
    assert gaps[0] == "the file ends early"


def test_peaks_that_are_not_known_are_said() -> None:
    gaps = not_looked_at(unheard_of(slow_run()))
    assert any("NVIDIA Unheard-of" in gap and "steplab doctor" in gap for gap in gaps)
    assert not any("Unheard-of" in gap for gap in not_looked_at(unheard_of(slow_run()), CEILINGS))
    assert any("does not name" in gap for gap in not_looked_at(foreign(profile(SLOW))))


def test_ceilings_serve_where_the_catalogue_does_not_know_the_device() -> None:
    run = unheard_of(slow_run())
    [fp32] = [f for f in explain(run) if f.kind == "fp32_matmul"]
    assert fp32.saves_s is None
    [fp32] = [f for f in explain(run, CEILINGS) if f.kind == "fp32_matmul"]
    # The best repeats: 2e13 and 1e14 FLOP/s, a ratio of 5; less of a product that is not as large.
    assert fp32.saves_s is not None
    assert 0.95 * 50 * MS * (1 - 1 / 5) < fp32.saves_s < 50 * MS * (1 - 1 / 5)
    gpu = sure(gpu_of_run(run, CEILINGS))
    # By the rates it would take as long as doctor measured.
    assert streaming_s("copy", 1e10, gpu) == pytest.approx(1e10 / 1e12, rel=0.01)
    assert product_s(Product(m=8192, n=8192, k=8192), "fp32", gpu) == pytest.approx(2 * 8192**3 / 2e13, rel=0.01)


def test_ceilings_of_another_device_do_not_count() -> None:
    gpu = sure(gpu_of_run(slow_run(), CEILINGS))
    assert gpu.bandwidth_bytes_per_s == BYTES_PER_S
    elsewhere = dataclasses.replace(
        ENVIRONMENT, device=dataclasses.replace(ENVIRONMENT.device, name="NVIDIA Even less known")
    )
    assert gpu_of_run(dataclasses.replace(slow_run(), environment=elsewhere), CEILINGS) is None


def test_recorded_runs_without_a_profile_get_the_findings_that_need_none() -> None:
    without = {diagnosis.__name__ for diagnosis in WITHOUT_PROFILE}
    seen: set[str] = set()
    for run in stored("step_h200", Run):
        found = explain(run)
        check(found, run)
        seen |= {f.kind for f in found}
        assert bool(not_looked_at(run))
    assert seen <= without
    assert seen == {"batch_too_small", "head_dimension"}  # those runs have fused AdamW and an aligned vocabulary


def check(found: list[Finding], run: Run) -> None:
    for finding in found:
        assert finding.kind in {diagnosis.__name__ for diagnosis in DIAGNOSES}
        assert all((finding.title, finding.saw, finding.why, finding.change, finding.evidence, finding.prediction))
        assert all(math.isfinite(e.value) and e.value >= 0 for e in finding.evidence)
        assert not (finding.prediction.startswith("At most") and finding.saves_s is not None) or finding.at_most
        assert finding.saves_s is None or (math.isfinite(finding.saves_s) and finding.saves_s >= 0)
        if run.spec is None:
            assert finding.fields == {}
        elif finding.fields:
            assert with_fields(run.spec, finding.fields) != run.spec
            assert finding.change == command(run.spec, finding.fields)


# --- whatever the profile ---------------------------------------------------------------------------------

NAMES = (
    "aten::mm",
    "aten::bmm",
    "aten::copy_",
    "aten::_softmax",
    "aten::_log_softmax",
    "aten::item",
    "triton_poi_fused_",
)
RANGES = ("", "head", "loss", "blocks.*", "blocks.*.attention.scores", "blocks.*.attention.values", "a (dynamo_timed)")
INPUTS = (
    "",
    "bf16[48, 64, 64]",
    "bf16[64, 64] fp32[64, 64]",
    "fp32[256, 10000]",
    "bf16[4, 12, 64, 64] bool[64, 64]",
    "bf16[48, 64, 16] bf16[48, 16, 64]",
    "int64[] odd[1",
)


@st.composite
def ops(draw: st.DrawFn) -> OpStats:
    return op(
        draw(st.sampled_from(NAMES)),
        draw(st.sampled_from(CATEGORIES)),
        draw(st.sampled_from([0.0, 1e-3, 1.0, 100.0])),
        phase=draw(st.sampled_from([*PHASES, "outside"])),
        where=draw(st.sampled_from(RANGES)),
        inputs=draw(st.sampled_from(INPUTS)),
        dtype=draw(st.sampled_from(["", "fp32", "bf16"])),
        calls=draw(st.integers(1, 200)),
        flops=draw(st.sampled_from([None, 0.0, 1e9, 1e13])),
        moved=draw(st.sampled_from([None, 0.0, 1e6, 1e10])),
    )


FIELDS = st.sampled_from(
    [
        {"model": "small", "precision": "bf16"},
        {"model": "2.7b", "precision": "fp32", "attention": "sdpa", "optimizer": "adamw_foreach"},
        {"model": "tiny", "precision": "fp16", "compile": "reduce-overhead", "pass": "forward"},
        {"model": "small", "model.vocab_size": 64, "context": 64, "compile": "default"},
        None,
    ]
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=FIELDS,
    seen=st.lists(ops(), min_size=1, max_size=12),
    waiting=st.dictionaries(st.sampled_from(PHASES), st.sampled_from([0.0, 0.5, 80.0])),
    step_ms=st.sampled_from([None, 0.01, 20.0, 1e4]),
    device=st.sampled_from(["cuda", "cpu"]),
    exposed=st.booleans(),
)
def test_no_profile_upsets_it(
    fields: dict[str, object] | None,
    seen: list[OpStats],
    waiting: dict[str, float],
    step_ms: float | None,
    device: str,
    exposed: bool,
) -> None:
    made = profile(
        seen,
        waiting_ms=waiting,
        device=device,
        host_calls=(host_call("cudaStreamSynchronize", phase="optimizer"),),
        communication=Communication(total_s=0.02, overlapped_s=0.0) if exposed else None,
    )
    if fields is None:
        run = foreign(made)
    else:
        run = own(fields, made, timing(step_ms, optimizer=0.1 * step_ms) if step_ms else None)
    found = explain(run)
    check(found, run)
    assert found == explain(run)
    order = [-1.0 if f.saves_s is None else f.saves_s for f in found]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize(("step_ms", "shown"), [(5.0, "2.00"), (8.0, "1.25"), (10.0, None), (12.0, None)])
def test_times_that_are_not_those_of_the_profile_say_so(step_ms: float, shown: str | None) -> None:
    """On a CPU, a step of 10 ms under the profiler, 4 of them in collectives."""
    seen = profile(
        [op("aten::mm", "matmul", 10.0)], device="cpu", communication=Communication(total_s=8e-3, overlapped_s=0.0)
    )
    for device in ("cpu", "cuda"):
        run = own({"layout": "dp=2"}, dataclasses.replace(seen, device=device), timing(step_ms))
        (found,) = (finding for finding in explain(run) if finding.kind == "communication_exposed")
        scaled = device == "cpu" and shown is not None
        assert f"for {4 / float(shown) if scaled and shown else 4:.2f} ms per step" in found.saw
        how = f"Times are scaled to the unprofiled step; the profiled one took {shown} times as long."
        assert found.saw.endswith(how) == scaled
        assert ("scaled" in found.saw) == scaled


# --- words and shapes -------------------------------------------------------------------------------------


def test_the_command_measures_the_step_with_the_change_and_leaves_defaults_out() -> None:
    spec = resolve_step({"model": "small", "context": 512, "pass": "forward_backward", "model.num_layers": 4})
    said = command(spec, {"attention": "sdpa", "model.vocab_size": "10048"})
    assert said == (
        "steplab run --model small --model.num-layers 4 --context 512 --pass forward_backward --attention sdpa "
        "--model.vocab-size 10048"
    )


def test_a_name_that_the_shell_would_take_apart_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    spec = resolve_step({"model": f"hf:{folder}/config.json"})
    assert f"'hf:{folder}/config.json'" in command(spec, {})


def test_shapes_are_read_back() -> None:
    read = shapes_of(op("aten::where", "elementwise", 1.0, inputs="bool[4, 1] bf16[2048, 768] int64[7]"))
    assert read == (
        Shape(dtype="bool", sizes=(4, 1)),
        Shape(dtype="bf16", sizes=(2048, 768)),
        Shape(dtype="int64", sizes=(7,)),
    )
    assert [s.size_bytes for s in read] == [None, 2048 * 768 * 2, None]


def test_a_factorys_whole_step_has_no_fields_that_would_change_it() -> None:
    spec = resolve_step({"model": "my.models:make_step", "precision": "fp32"})
    whole = dataclasses.replace(slow_run(), spec=spec, model=None, timing=timing(60.0))
    simt = profile(SLOW, kernel_names={"aten::mm": "ampere_sgemm_128x64_tn"})
    found = explain(dataclasses.replace(whole, profile=simt))
    assert {f.kind: f.fields for f in found} == {"fp32_matmul": {}}
    assert found[0].change == 'torch.set_float32_matmul_precision("high")'


def test_a_factorys_module_brings_its_own_attention() -> None:
    scores = op("aten::_softmax", "softmax", 20.0, inputs="bf16[4, 12, 512, 512]")
    fused = op("aten::_flash_attention_forward", "attention", 20.0, inputs="bf16[4, 512, 32, 80]")
    spec = resolve_step({"model": "my.models:make", "precision": "bf16", "attention": "sdpa"})
    shares = CompiledShares(memory_bound=1.0, products=1.0, kernels=1.0, host=1.0)  # one softmax is fused with nothing
    run = dataclasses.replace(slow_run(), spec=spec, profile=profile([scores, fused], compiled=shares))
    kinds = {f.kind: f.fields for f in explain(run)}
    assert kinds == {"scores_materialised": {}, "head_dimension": {}}
