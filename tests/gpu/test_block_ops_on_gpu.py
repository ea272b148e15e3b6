from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.test_block_ops import check_heads, check_model, check_norms, check_swiglu
from torch import Tensor

from steplab.lab.memory import memory
from steplab.model.build import build_workload
from steplab.model.checkpointing import wrap_block
from steplab.model.compiling import repeated_blocks
from steplab.model.workload import call, loss_of
from steplab.ops.rms_norm import add_rms_norm, plain_add_rms_norm
from steplab.ops.rotary_heads import plain_rotary_heads, rotary_heads
from steplab.ops.swiglu import plain_swiglu, swiglu
from steplab.plan.memory import predict_memory
from steplab.specs.resolve import resolve_step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2048, 12_800), (3, 14), (257, 1, 2050), (40, 2)], ids=str)
def test_swiglu_is_as_near_to_float64_as_the_format_allows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_swiglu(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(4, 512, 25, 25, 64), (1, 1024, 32, 32, 80), (2, 300, 8, 2, 128), (2, 5, 3, 1, 10), (2, 3, 1, 1, 2)],
    ids=str,
)
def test_heads_are_as_near_to_float64_as_the_format_allows(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_heads(sizes, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stream", ["fp32", "the same"])
@pytest.mark.parametrize("shape", [(2048, 1600), (8192, 2560), (3, 7), (600, 4097), (1, 40)], ids=str)
def test_norms_are_as_near_to_float64_as_the_format_allows(
    shape: tuple[int, ...], stream: str, dtype: torch.dtype
) -> None:
    check_norms(shape, torch.float32 if stream == "fp32" else dtype, dtype, "cuda")


@pytest.mark.parametrize(
    "variant",
    [
        {"attention": "flash_triton"},
        {"attention": "sdpa_cudnn"},
        {"attention": "sdpa", "model.num_kv_heads": 2, "model.biases": "all"},
    ],
    ids=str,
)
def test_a_model_of_fused_blocks_is_the_plain_model(variant: dict[str, object]) -> None:
    sizes = {"context": 96, "model.d_model": 256, "model.d_ff": 344, "precision": "bf16"}  # heads of 64 columns
    check_model(variant | sizes, "cuda")


def test_compiled_blocks_make_gradients_of_fp32_weights_in_their_products() -> None:
    """They equal the eager block's except for its rounding to bf16, which the head's still has."""
    found = [made_by(compiled=compiled) for compiled in (False, True)]
    for name, eager in found[0].items():
        rounded, whole = eager.bfloat16().float(), found[1][name]
        torch.testing.assert_close(whole, eager, rtol=2**-7, atol=2**-7 * float(eager.abs().max()))
        if name == "head.weight" or name.endswith(("gate_up.weight", "down.weight", "output.weight", "value.weight")):
            assert torch.equal(eager, rounded), name
            assert torch.equal(whole, whole.bfloat16().float()) == (name == "head.weight"), name


def made_by(*, compiled: bool) -> dict[str, Tensor]:
    spec = resolve_step(
        {"model": "small", "model.projections": "merged", "model.num_layers": 2, "context": 256, "batch": 2,
         "precision": "bf16", "block_ops": "triton", "attention": "sdpa_flash", "device": "cuda"}
    )  # fmt: skip
    torch.manual_seed(0)
    built = build_workload(spec, torch.device("cuda"))
    assert built.module is not None
    assert built.make_batch is not None
    if compiled:
        for index, block in enumerate(repeated_blocks(built.module)):
            wrap_block(block, index, checkpointing="none", compile_mode="block", split=False)
    with torch.autocast("cuda", BF16):
        loss_of(call(built.module, built.make_batch())).backward()
    return {name: parameter.grad for name, parameter in built.module.named_parameters() if parameter.grad is not None}


def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of GPU memory")
    rows, width = 2**19 + 5, 4104
    joined = torch.randn(rows, width, dtype=BF16, device="cuda", requires_grad=True)
    assert joined.numel() > 2**31
    last = joined.detach()[-2:].clone().requires_grad_()
    swiglu(joined).backward(torch.ones(rows, width // 2, dtype=BF16, device="cuda"))
    plain_swiglu(last).backward(torch.ones(2, width // 2, dtype=BF16, device="cuda"))
    assert joined.grad is not None
    torch.testing.assert_close(joined.grad[-2:], last.grad)

    angles = torch.rand(rows, 4, device="cuda")
    table = torch.stack((angles.cos(), angles.sin()))
    merged = joined.detach().unsqueeze(0)
    del joined, last
    q = rotary_heads(merged, table, 511)[0]
    wanted = plain_rotary_heads(merged[:, -2:], table[:, -2:], 511)[0]
    torch.testing.assert_close(q[:, :, -2:], wanted, rtol=0.01, atol=0.01)
    del q, wanted

    x = merged[0]
    weight = torch.rand(width, dtype=BF16, device="cuda")
    normed = add_rms_norm(x, x, weight, 1e-5)[0]
    plain = plain_add_rms_norm(x[-2:].float(), x[-2:].float(), weight.float(), 1e-5)[0]
    torch.testing.assert_close(normed[-2:].float(), plain, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16", "attention": "sdpa_flash"},
        {"precision": "bf16", "attention": "sdpa_flash", "checkpointing": "full"},
        {"precision": "fp32", "attention": "plain"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_what_is_alive_at_the_peak_of_an_eager_step_is_the_plans(fields: dict[str, Any], tmp_path: Path) -> None:
    """Each category to the KiB; how full blocks are depends on earlier releases."""
    merged: dict[str, Any] = {
        "model.projections": "merged",
        "context": 256,
        "block_ops": "triton",
        "warmup": 2,
        "steps": 3,
    }
    run = memory("small", **merged, **fields, store=tmp_path / "store.db")
    assert run.memory_profile is not None, run.failure
    assert run.spec is not None
    predicted = predict_memory(run.spec, device=torch.cuda.get_device_name()).at_peak
    measured = run.memory_profile.at_peak
    for category in (predicted.keys() | measured.keys()) - {"rounding"}:
        assert measured.get(category, 0) == pytest.approx(predicted.get(category, 0), abs=1024), category
