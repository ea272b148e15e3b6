from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tests.stored_records import stored

import steplab
from steplab.errors import Unsupported
from steplab.measurement.observer import Observer
from steplab.measurement.step_job import measure_here
from steplab.ops.attention.api import attention, choice_for
from steplab.ops.attention.choice_rule import Choice, choose
from steplab.records.attention import AttentionRun
from steplab.records.run import Run
from steplab.specs.attention import AttentionSpec
from steplab.specs.resolve import resolve_step

SERVED = {"dtype": "bfloat16", "head_dim": 64, "num_queries": 512, "num_keys": 512, "causal": True, "hopper": True}


def chosen(device: str = "NVIDIA H200", **fields: object) -> Choice:
    return choose(device=device, **SERVED | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "flash_triton"),
        ({"device": "NVIDIA H100 80GB HBM3", "head_dim": 128}, "flash_triton"),
        ({"dtype": "float16", "grouped": True}, "flash_triton"),
        ({"num_keys": 600}, "flash_triton"),
        ({"hopper": False}, "sdpa_cudnn"),
        ({"hopper": False, "head_dim": 20}, "sdpa_flash"),  # no multiple of 8
        ({"hopper": False, "num_keys": 600, "head_dim": 20}, "sdpa"),
        ({"dtype": "float32"}, "sdpa_efficient"),
        ({"dtype": "float32", "grouped": True}, "sdpa"),
        ({"dtype": "float64"}, "sdpa"),
        ({"head_dim": 129}, "sdpa"),
        ({"device": "NVIDIA L40S"}, "sdpa"),
        ({"device": "cpu"}, "sdpa"),
    ],
)
def test_the_fastest_that_takes_the_inputs_is_chosen(fields: dict[str, object], expected: str) -> None:
    assert chosen(**fields).implementation == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "the fastest measured on H100 and H200 in bfloat16"),
        ({"hopper": False}, "the fastest measured on H100 and H200 in bfloat16 without flash_triton's Hopper kernels"),
        ({"device": "NVIDIA L40S"}, "nothing was measured on NVIDIA L40S for bfloat16"),
        ({"head_dim": 136}, "nothing was measured beyond head dimension 128"),
        ({"dtype": "float32", "grouped": True}, "nothing that was measured takes such inputs"),
    ],
)
def test_the_reason_says_why(fields: dict[str, object], reason: str) -> None:
    assert chosen(**fields).reason == reason  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"dtype": "bf16"}, {"dtype": torch.bfloat16}, {"head_dim": -1}])
def test_a_misspelt_type_is_refused_and_not_left_to_torch(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^attention is chosen for one of float32, .* of 1 or more, not for "):
        chosen(**fields)  # type: ignore[arg-type]


def test_the_documented_choice_is_made() -> None:
    text = (Path(__file__).parents[2] / "docs/attention.md").read_text(encoding="utf-8")
    (shown,) = (block.split("```")[0] for block in text.split("```python\n")[1:] if "choose(" in block)
    names: dict[str, object] = {}
    exec(shown, names)
    choice = names["choice"]
    assert isinstance(choice, Choice)
    assert f"choice.implementation  # {choice.implementation!r}" in shown
    assert f"choice.reason  # {choice.reason!r}" in shown


def test_a_cpu_gets_torchs_own() -> None:
    q = torch.ones(1, 2, 4, 8)
    assert choice_for(q, q, causal=True).implementation == "sdpa"
    asked = {"dtype": "float32", "head_dim": 8, "num_queries": 4, "num_keys": 4, "causal": True}
    assert choose(device="cpu", **asked).reason == "nothing was measured on cpu for float32"  # type: ignore[arg-type]


def test_within_a_compiled_graph_the_choice_is_made_for_each_shape() -> None:
    def run(q: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q, causal=True, implementation="auto")

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for length in (4, 5, 6):  # torch takes a size for a symbol once it has changed
        q = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(compiled(q), run(q))


def test_plans_predict_what_is_chosen_on_the_gpu_and_name_it() -> None:
    fields: dict[str, Any] = {"model": "small", "context": 512, "precision": "bf16"}
    chosen = choose(device="NVIDIA H200", dtype="bfloat16", head_dim=64, num_queries=512, num_keys=512, causal=True)
    told = f"attention auto: {chosen.implementation}, {chosen.reason}"
    for gpu, name in (("H200 SXM", chosen.implementation), ("L40S", "sdpa")):
        auto, named = (
            (
                steplab.plan_time(attention=attention, gpu=gpu, **fields),
                steplab.plan_memory(attention=attention, gpu=gpu, **fields),
                steplab.plan_memory(attention=attention, gpu=gpu, layout="dp=2", **fields),
                steplab.plan_layout(attention=attention, gpu=gpu, gpus=2, global_batch=8, **fields),
            )
            for attention in ("auto", name)
        )
        assert auto[0].central_s == named[0].central_s
        assert [each.peak_bytes for each in auto[1:3]] == [each.peak_bytes for each in named[1:3]]
        assert auto[3].candidates == named[3].candidates
        said = told if name != "sdpa" else "attention auto: sdpa, nothing was measured on NVIDIA L40S"
        assert all(any(note.startswith(said) for note in each.notes) for each in auto)
        assert all(each.spec is not None and each.spec.attention == "auto" for each in auto)


def test_a_run_says_what_was_chosen() -> None:
    spec = resolve_step({"model": "tiny", "device": "cpu", "attention": "auto", "context": 16, "warmup": 0, "steps": 1})
    run = measure_here(spec, Observer())
    assert run.failure is None
    assert "attention auto: sdpa, nothing was measured on cpu for float32" in run.notes


def test_transformers_models_take_none_but_torchs() -> None:
    from steplab.model.hf import build_hf
    from steplab.specs.model import ModelSpec

    spec = resolve_step({"model": "tiny", "device": "cpu", "attention": "flash_triton"})
    assert isinstance(spec.model, ModelSpec)
    with pytest.raises(Unsupported, match=r"'flash_triton' for .*choose one of plain, sdpa"):
        build_hf(spec, torch.device("cpu"))


# --- against recorded benchmarks ---------------------------------------------------------------------------

PORTABLE = "9db2e697ab2d"


@pytest.fixture(scope="module")
def records() -> dict[str, AttentionRun | Run]:
    names = "attention_h200", "attention_h100", "attention_triton_h200"
    benchmarks = {run.id: run for name in names for run in stored(name, AttentionRun)}
    return benchmarks | {run.id: run for name in names for run in stored(name, Run)}


def test_autos_rule_is_the_fastest_within_three_per_cent(records: dict[str, AttentionRun | Run]) -> None:
    taken: dict[tuple[str, AttentionSpec], dict[str, float]] = {}
    for record in records.values():
        if isinstance(record, AttentionRun) and record.id != PORTABLE and record.created_utc >= "2026-11-23":
            for cell in record.cells:
                samples = cell.samples("both")
                if samples and cell.spec.dim <= 128 and cell.spec.implementation not in ("plain", "flash_attn_4"):
                    taken.setdefault((record.id, cell.spec.shape), {})[cell.spec.implementation] = median(samples)
    checked = [
        times_s[chosen] / min(times_s.values())
        for (record_id, spec), times_s in taken.items()
        if len(times_s) > 1 and (chosen := rule(str(records[record_id].device_name), spec)) in times_s
    ]
    assert len(checked) >= 200
    assert max(checked) < 1.03


def rule(device: str, spec: AttentionSpec) -> str:
    return choose(
        device=device,
        dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[spec.dtype],
        head_dim=spec.dim,
        num_queries=spec.queries,
        num_keys=spec.num_keys,
        causal=spec.causal,
        grouped=spec.num_kv_heads != spec.heads,
        hopper=True,
    ).implementation
