"""What a precision did to two layers with a norm between, recorded on an H200, where autocast has all its rules."""

import lzma
from pathlib import Path

import pytest

from steplab.records.codec import decode
from steplab.records.numerics import Numerics

RECORDS = Path(__file__).parents[1] / "golden" / "precision_h200_202611.jsonl.xz"


@pytest.fixture(scope="module")
def audits() -> dict[str, Numerics]:
    found = map(decode, lzma.decompress(RECORDS.read_bytes()).splitlines())
    toys = [record for record in found if isinstance(record, Numerics) and record.name == "toy"]
    return {record.spec.precision: record for record in toys if record.spec}


@pytest.mark.parametrize(("precision", "low"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_types_under_autocast(audits: dict[str, Numerics], precision: str, low: str) -> None:
    audit = audits[precision].audit
    assert audit is not None
    modules = {module.module: module for module in audit.modules}
    for name in ("fc1", "ln", "fc2"):
        assert modules[name].parameters == ("float32",)
        assert modules[name].gradients == ("float32",)
    assert modules["fc1"].outputs == (low,)
    assert modules["ln"].outputs == ("float32",)
    assert modules["fc2"].outputs == (low,)  # the logits
    assert modules[""].outputs == ("float32",)  # the loss
    assert audit.loss_dtype == "float32"
    backward = [matmul for matmul in audit.matmuls if matmul.node is not None]
    assert {matmul.module for matmul in backward} == {"fc1", "fc2"}
    assert {(matmul.inputs, matmul.outputs) for matmul in backward} == {((low, low), (low,))}
    assert audit.kept_on_cuda == ()


def test_norms_of_the_residual_stream_need_no_rule() -> None:
    """torch 2.11 has none for rms_norm, 2.12 has fp32: of fp32 inputs both make fp32, which is what `plan` follows."""
    found = map(decode, lzma.decompress(RECORDS.read_bytes()).splitlines())
    audits = [record.audit for record in found if isinstance(record, Numerics) and record.name != "toy"]
    norms = [use for audit in audits if audit for use in audit.operations if use.op == "rms_norm"]
    assert {use.rule for use in norms} == {"none"}
    assert {(use.inputs, use.outputs) for use in norms} == {(("float32",), ("float32",))}


def test_what_is_added_up_wrongly_on_this_machine_too(audits: dict[str, Numerics]) -> None:
    sums = {(a.accumulator, a.addend): f"{a.result:.4f}" for a in audits["fp16"].accumulations}
    assert sums["float32", "float32"] == "10.0001"
    assert sums["float16", "float16"] == "9.9531"
    assert sums["float32", "float16"] == "10.0021"
