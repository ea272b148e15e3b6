"""What `auto` chooses, and that it says so."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.documents import chapter_says

import steplab
from steplab.errors import Unsupported
from steplab.measurement.observer import Observer
from steplab.measurement.step.session import measure_here
from steplab.ops.attention.api import IMPLEMENTATIONS, attention
from steplab.ops.attention.choice import choice_for
from steplab.ops.attention.choice_table import Choice, Measured, choose, choose_from, table, unfit
from steplab.specs.resolve import resolve_step


def measured(head_dim: int, *rows: tuple[float, ...], causal: bool = True) -> Measured:
    return Measured(
        gpu="GPU A",
        dtype="bfloat16",
        head_dim=head_dim,
        causal=causal,
        source="a test",
        implementations=("sdpa_cudnn", "flash_triton", "flash_attn_4"),
        rows=rows,
    )


TABLE = (
    measured(64, (512, 1.0, 2.0, 3.0), (4096, 2.0, 1.0, 3.0), (16384, 3.0, 2.0, 1.0)),
    measured(128, (512, 2.0, 1.0, math.inf)),
    measured(64, (512, math.inf, 5.0, 6.0), causal=False),
)


def chosen(head_dim: int = 64, tokens: float = 512, causal: bool = True, **others: object) -> Choice:
    given: dict[str, object] = {"device": "GPU A", "dtype": "bfloat16", "without": set()} | others
    return choose_from(TABLE, head_dim=head_dim, tokens=tokens, causal=causal, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "sdpa_cudnn"),
        ({"tokens": 4096}, "flash_triton"),
        ({"tokens": 1400}, "sdpa_cudnn"),  # by factors: 2.7 times 512, 2.9 times short of 4096
        ({"tokens": 1500}, "flash_triton"),
        ({"tokens": 10**6}, "flash_attn_4"),
        ({"tokens": 10**6, "without": {"flash_attn_4"}}, "flash_triton"),
        ({"tokens": 10**6, "without": {"flash_attn_4", "flash_triton"}}, "sdpa_cudnn"),
        ({"tokens": 1}, "sdpa_cudnn"),
        ({"head_dim": 80}, "sdpa_cudnn"),
        ({"head_dim": 96}, "flash_triton"),
        ({"head_dim": 128}, "flash_triton"),
        ({"causal": False}, "flash_triton"),
    ],
)
def test_the_fastest_at_the_nearest_shape_is_taken(fields: dict[str, object], expected: str) -> None:
    assert chosen(**fields).implementation == expected  # type: ignore[arg-type]


def test_the_reason_names_the_measurement() -> None:
    assert chosen().reason == "fastest of 3 on GPU A at 512 tokens, head dimension 64, bfloat16 (a test)"


@pytest.mark.parametrize("fields", [{"device": "GPU B"}, {"dtype": "float16"}])
def test_what_was_not_measured_is_left_to_torch(fields: dict[str, object]) -> None:
    """And never another GPU's best."""
    choice = chosen(**fields)  # type: ignore[arg-type]
    assert choice.implementation == "sdpa"
    assert choice.reason.startswith("nothing was measured on GPU")


def test_beyond_the_largest_head_dimension_that_was_measured_it_is_left_to_torch() -> None:
    """There flash_triton's backward pass is another kernel than the one whose times are known."""
    choice = chosen(head_dim=129)
    assert choice.implementation == "sdpa"
    assert choice.reason == "nothing was measured on GPU A for bfloat16, causal, beyond head dimension 128"
    assert chosen(head_dim=65, causal=False).implementation == "sdpa"  # of which 64 columns alone were measured


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_committed_table_says_nothing_of_head_dimensions_that_it_lacks(dtype: str, causal: bool) -> None:
    asked: dict[str, object] = SERVED | {"dtype": dtype, "causal": causal}
    for gpu in {entry.gpu for entry in table()}:
        widest = max(entry.head_dim for entry in table() if (entry.gpu, entry.dtype) == (gpu, dtype))
        within, beyond = (choose(device=gpu, **asked | {"head_dim": dim}) for dim in (widest, widest + 8))  # type: ignore[arg-type]
        assert "fastest of" in within.reason
        assert beyond.implementation == "sdpa"
        assert f"beyond head dimension {widest}" in beyond.reason


@pytest.mark.parametrize("fields", [{"dtype": "bf16"}, {"dtype": torch.bfloat16}, {"head_dim": -1}])
def test_a_misspelt_type_is_refused_and_not_left_to_torch(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^attention is chosen for one of float32, .* of 1 or more, not for "):
        choose(device="NVIDIA H200", **SERVED | fields)  # type: ignore[arg-type]


def test_where_nothing_runs_it_is_left_to_torch() -> None:
    choice = chosen(without={"sdpa_cudnn", "flash_triton", "flash_attn_4"})
    assert choice.implementation == "sdpa"


SERVED = {"dtype": "bfloat16", "head_dim": 64, "num_queries": 512, "num_keys": 512, "causal": True}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, set()),
        ({"grouped": True}, {"sdpa_efficient"}),
        ({"head_dim": 20}, {"sdpa_efficient", "sdpa_cudnn", "flash_attn_4"}),
        ({"head_dim": 20, "dtype": "float32"}, {"sdpa_flash", "sdpa_cudnn", "flash_attn_4"}),
        ({"head_dim": 256}, {"sdpa_cudnn", "flash_attn_4"}),
        ({"head_dim": 512}, {"sdpa_cudnn", "flash_attn_4", "sdpa_flash", "flash_triton"}),
        ({"num_keys": 600}, {"sdpa_flash", "flash_attn_4"}),
        ({"num_keys": 600, "causal": False}, set()),
        ({"num_keys": 0, "causal": False}, {"sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "flash_attn_4"}),
    ],
)
def test_who_does_not_take_the_inputs_is_not_chosen(fields: dict[str, object], expected: set[str]) -> None:
    asked: dict[str, object] = SERVED | fields
    assert unfit(**asked) == expected  # type: ignore[arg-type]
    for entry in table():
        assert choose(device=entry.gpu, **asked).implementation not in expected  # type: ignore[arg-type]


def test_a_row_without_a_time_for_each_is_refused() -> None:
    with pytest.raises(ValueError, match="one time for each implementation"):
        measured(64, (512, 1.0))


def test_the_committed_table_has_names_that_there_are() -> None:
    for entry in table():
        assert set(entry.implementations) <= set(IMPLEMENTATIONS) - {"auto", "plain", "sdpa_math", "flash_reference"}
        assert all(row[0] > 0 and min(row[1:]) > 0 for row in entry.rows)
        assert entry.dtype in ("float32", "bfloat16", "float16")


def test_the_chapter_counts_the_rows_in_which_flash_triton_is_the_fastest() -> None:
    entries = [entry for entry in table() if entry.dtype == "bfloat16"]
    fastest = [
        min(zip(row[1:], entry.implementations, strict=True))[1] == "flash_triton"
        for entry in entries
        for row in entry.rows
    ]
    chapter_says("attention", f"takes the least time in {sum(fastest)} of {len(fastest)} rows")


def test_the_documented_choice_is_made() -> None:
    """docs/attention.md shows a choice by the committed table, and what comes of it in comments."""
    text = (Path(__file__).parents[2] / "docs/attention.md").read_text(encoding="utf-8")
    (shown,) = (block.split("```")[0] for block in text.split("```python\n")[1:] if "choose(" in block)
    names: dict[str, object] = {}
    exec(shown, names)
    choice = names["choice"]
    assert isinstance(choice, Choice)
    assert f"choice.implementation  # {choice.implementation!r}" in shown
    assert f"choice.reason  # '{choice.reason.split('(')[0]}(...)'" in shown


def test_a_cpu_gets_torchs_own() -> None:
    q = torch.ones(1, 2, 4, 8)
    assert choice_for(q, q, causal=True).implementation == "sdpa"
    asked = {"dtype": "float32", "head_dim": 8, "num_queries": 4, "num_keys": 4, "causal": True}
    assert choose(device="cpu", **asked).reason == "nothing was measured on cpu for float32, causal"  # type: ignore[arg-type]


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
    assert "attention auto: sdpa, nothing was measured on cpu for float32, causal" in run.notes


def test_a_step_runs_on_the_tiled_reference() -> None:
    spec = resolve_step(
        {"model": "tiny", "device": "cpu", "attention": "flash_reference", "context": 80, "batch": 1}
        | {"model.num_layers": 1, "warmup": 0, "steps": 1}
    )
    run = measure_here(spec, Observer())
    assert run.failure is None


def test_transformers_models_take_none_but_torchs() -> None:
    from steplab.model.hf import build_hf
    from steplab.specs.model import ModelSpec

    spec = resolve_step({"model": "tiny", "device": "cpu", "attention": "flash_triton"})
    assert isinstance(spec.model, ModelSpec)
    with pytest.raises(Unsupported, match=r"'flash_triton' for .*choose one of plain, sdpa"):
        build_hf(spec, torch.device("cpu"))
