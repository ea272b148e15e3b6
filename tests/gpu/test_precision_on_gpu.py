import pytest
import torch
from torch import nn

from steplab.measurement.jobs import AuditTask
from steplab.measurement.observer import Observer
from steplab.measurement.precision.modes import op_name, rule_of
from steplab.measurement.precision.session import accumulate, audit_step
from steplab.records.numerics import Audit
from steplab.specs.resolve import resolve_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

LOW = {"fp16": "float16", "bf16": "bfloat16"}


def audit(**fields: object) -> Audit:
    spec = resolve_step({"model": "toy", "device": "cuda"} | fields)
    record = audit_step(AuditTask(spec=spec, device="cuda"), Observer())
    assert record.failure is None
    assert record.audit is not None
    return record.audit


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_toy_under_autocast(precision: str) -> None:
    found, low = audit(precision=precision), LOW[precision]
    modules = {module.module: module for module in found.modules}
    assert {t for module in found.modules for t in module.parameters} == {"float32"}
    assert modules["fc1"].outputs == (low,)
    assert modules["ln"].outputs == ("float32",)
    assert modules["fc2"].outputs == (low,)
    assert found.loss_dtype == "float32"
    assert {t for module in found.modules for t in module.gradients} == {"float32"}
    assert modules["ln"].output_gradients == ("float32",)
    assert modules["fc1"].output_gradients == (low,)
    products = [matmul for matmul in found.matmuls if matmul.phase == "backward"]
    assert [(matmul.module, matmul.inputs, matmul.outputs, matmul.calls) for matmul in products] == [
        ("fc2", (low, low), (low,), 2),
        ("fc1", (low, low), (low,), 1),
    ]
    assert {op.op: op.rule for op in found.operations} == {
        "linear": "low_precision",
        "relu": "none",
        "layer_norm": "fp32",
        "cross_entropy": "fp32",
    }
    assert found.kept_on_cuda == ()


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_backward_product_of_the_transformer_is_in_low_precision_and_has_its_module(
    precision: str, attention: str
) -> None:
    found = audit(model="tiny", precision=precision, attention=attention)
    products = [matmul for matmul in found.matmuls if matmul.phase == "backward"]
    modules = {matmul.module for matmul in products}
    assert {t for matmul in products if matmul.op == "aten::mm" for t in matmul.inputs} == {LOW[precision]}
    assert {"head", "blocks.0.attention", "blocks.1.feed_forward.down"} <= modules
    assert "" not in modules
    softmax = [op for op in found.operations if op.op == "softmax"]
    assert [op.rule for op in softmax] == (["fp32"] if attention == "plain" else [])


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16_pure"])
def test_without_autocast_there_is_one_type(precision: str) -> None:
    found = audit(model="tiny", precision=precision)
    dtype = "bfloat16" if precision == "bf16_pure" else "float32"
    assert {t for module in found.modules for t in (*module.parameters, *module.gradients)} == {dtype}
    assert {op.rule for op in found.operations} <= {"off", "cast"}
    assert found.reference_loss is not None
    if precision == "fp32":
        assert found.loss == pytest.approx(found.reference_loss, rel=1e-6)
    if precision == "tf32":
        assert found.loss != found.reference_loss


def test_the_suggested_scale_saves_gradients_of_a_larger_model() -> None:
    scaling = audit(model="small", batch=1, context=128, precision="fp16").loss_scaling
    assert scaling is not None
    assert scaling.scaled.num_overflowed == 0
    assert scaling.unscaled.num_underflowed is not None
    assert scaling.scaled.num_underflowed is not None
    assert scaling.scaled.num_underflowed < scaling.unscaled.num_underflowed
    assert scaling.scaled.num_subnormal < scaling.unscaled.num_subnormal
    assert scaling.largest_gradient * scaling.suggested_scale <= 65504 / 8


@pytest.mark.parametrize(
    ("op", "num_tensors"),
    [
        (torch.matmul, 2),
        (torch.exp, 1),
        (torch.pow, 2),
        (torch.sum, 1),
        (torch.rsqrt, 1),
        (torch.relu, 1),
        (torch.add, 2),
        (nn.functional.mse_loss, 2),
        (nn.functional.silu, 1),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_rule_is_what_the_operation_does(op: object, num_tensors: int) -> None:
    rule, _ = rule_of(op_name(op), "cuda", ())

    def outcome(dtype: torch.dtype) -> torch.dtype:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = op(*(torch.ones(4, 4, dtype=dtype, device="cuda") for _ in range(num_tensors)))  # type: ignore[operator]
        return out.dtype

    assert (outcome(torch.float32) == torch.bfloat16) == (rule == "low_precision")
    assert (outcome(torch.bfloat16) == torch.float32) == (rule == "fp32")


def test_sums_on_a_gpu_are_those_on_a_cpu() -> None:
    assert accumulate(torch.device("cuda")) == accumulate(torch.device("cpu"))
