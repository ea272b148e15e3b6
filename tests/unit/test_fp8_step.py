import gzip
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.first import first
from tests.sure import sure
from torch import Tensor, nn
from torch.nn.functional import linear

from steplab.costs.rates import gpu_named
from steplab.errors import Unsupported
from steplab.measurement.machine.device import refuse_unserved
from steplab.measurement.step.step import ModelStep
from steplab.model import fp8_blocks
from steplab.model.build import build_workload
from steplab.model.compiling import repeated_blocks
from steplab.model.fp8_blocks import Fp8Block, Fp8Linear, products_by_torchao
from steplab.model.fused_block import AddRMSNorm, FusedBlock, FusedSelfAttention, FusedSwiGLU
from steplab.ops.fp8 import kernels
from steplab.ops.fp8.casts import E4M3, E5M2, plain_amax, plain_cast
from steplab.plan.dry_run.step import operators_of
from steplab.plan.memory import predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.codec import decode
from steplab.records.run import Run
from steplab.specs.changes import changes_for
from steplab.specs.resolve import resolve_step

assert kernels  # imported before the tests are collected, so that the interpreter is exact (tests/interpreted.py)
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
RECORDS = {"H200": "fp8_step_h200_202611.jsonl.gz", "H100": "fp8_h100_202611.jsonl.gz"}
TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": 2, "model.d_model": 32, "model.d_ff": 48, "model.num_heads": 2,
    "model.vocab_size": 40, "batch": 2, "context": 16, "device": "cpu",
}  # fmt: skip
PLANNED = {name: value for name, value in TINY.items() if name != "device"}
MERGED: dict[str, object] = {"model.projections": "merged"}
GPT_2: dict[str, object] = {"model.norm": "layernorm", "model.feed_forward": "gelu", "model.biases": "all"}


def built(precision: str, fields: dict[str, object]) -> ModelStep:
    spec = resolve_step(TINY | {"precision": precision} | fields)
    return ModelStep(build_workload(spec, CPU), spec, CPU)


def gradients(step: ModelStep) -> dict[str, Tensor]:
    step.forward()
    assert step.loss is not None
    step.loss.backward()
    return {name: parameter.grad for name, parameter in step.module.named_parameters() if parameter.grad is not None}


class Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = rounded(x, E4M3), rounded(weight, E4M3)
        ctx.save_for_backward(x8, w8)  # type: ignore[attr-defined]
        return linear(x8, w8)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8 = ctx.saved_tensors  # type: ignore[attr-defined]
        dy8 = rounded(dy, E5M2)
        return dy8 @ w8, dy8.flatten(0, -2).t() @ x8.flatten(0, -2)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    values, inverse_scale = plain_cast(x.bfloat16(), plain_amax(x.bfloat16()), dtype)
    return values.double() * inverse_scale.double()


class EmulatedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Emulated.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


def in_float64(fields: dict[str, object], *, emulated: bool) -> dict[str, Tensor]:
    step = built("fp32", fields | {"optimizer": "sgd"})
    module = step.module.double()
    for each in module.modules():
        if isinstance(each, nn.Linear):
            each.weight.data = each.weight.data.bfloat16().double()
            if each.bias is not None:
                each.bias.data = each.bias.data.bfloat16().double()
    for block in repeated_blocks(module) if emulated else ():
        for each in block.modules():
            if type(each) is nn.Linear:
                each.__class__ = EmulatedLinear
    return gradients(step)


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return max(float((found[name].double() - each).norm() / each.norm()) for name, each in exact.items())


@pytest.mark.parametrize(
    "fields", first(2, [MERGED, GPT_2, {}, {"checkpointing": "full"}, {"loss": "chunked"}]), ids=str
)
def test_gradients_are_as_near_to_float64_as_those_of_operands_in_fp8(fields: dict[str, object]) -> None:
    exact = in_float64(fields, emulated=False)
    of_fp8, of_bf16 = (error(gradients(built(precision, fields)), exact) for precision in ("fp8", "bf16_master"))
    bound = 1.1 * error(in_float64(fields, emulated=True), exact) + of_bf16
    assert of_bf16 < 0.02
    assert of_bf16 < of_fp8 < bound < 0.5  # e5m2 of every gradient: 6 % a layer


@pytest.mark.parametrize("fields", first(1, [{}, {"loss": "chunked", "checkpointing": "full"}]), ids=str)
def test_fused_operators_hand_on_magnitudes_and_change_no_bit_of_a_product(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = built("fp8", MERGED | fields | {"block_ops": "triton"})
    assert all(type(block) is Fp8Block for block in repeated_blocks(fused.module))
    searched = list[int]()
    find: Callable[[Tensor], Tensor] = torch.ops.steplab.amax

    def seen(x: Tensor) -> Tensor:
        searched.append(x.numel())
        return find(x)

    monkeypatch.setattr("steplab.ops.fp8.linear.amax", seen)
    found = gradients(fused)
    weights, others = 4, 3  # a block: its weights, attention's output, and gradients of both branches
    assert len(searched) == 2 * ((2 if "checkpointing" in fields else 1) * (weights + 1) + others - 1)
    dry = operators_of(resolve_step(PLANNED | MERGED | fields | {"precision": "fp8", "block_ops": "triton"}))
    assert sorted(op.reads[0].num_bytes // 2 for op in dry if op.name == "fp8_amax") == sorted(searched)
    for kind in (FusedBlock, AddRMSNorm, FusedSelfAttention, FusedSwiGLU):
        monkeypatch.setitem(fp8_blocks._IN_FP8, kind, kind)
    one_by_one = gradients(built("fp8", MERGED | fields | {"block_ops": "triton"}))
    assert all(torch.equal(found[name], each) for name, each in one_by_one.items())


@pytest.mark.parametrize("fields", [{}, {"update": "overlapped"}], ids=str)
def test_it_trains(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the update by operators of torch, which is quicker
    step, losses = built("fp8", fields), list[float]()
    assert sum(type(each) is Fp8Linear for each in step.module.modules()) == 2 * 7
    assert type(step.module.head) is nn.Linear
    for _ in range(12):
        step.forward()
        assert step.loss is not None
        losses.append(float(step.loss.detach()))
        for phase in step.phases[1:]:
            phase.run()
    assert losses[-2] < losses[0]
    assert losses[-1] < losses[1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model.d_ff": 40}, r"for tiny\[.*\] is not supported: .* multiples of 16, and the d-ff is 40; use .* bf16$"),
        ({"context": 12}, "multiples of 16, and the tokens in a batch is 24; use --precision bf16$"),
        ({"model": "package.module:function"}, "no block of steplab's Transformer; use --precision fp8_torchao, which"),
        ({"optimizer": "adamw_fused"}, "with optimizer adamw_fused .*; use --optimizer adamw_triton$"),
        ({"layout": "dp=2"}, "with layout dp=2 is not supported"),
    ],
)
def test_a_step_that_fp8_does_not_serve_is_refused(fields: dict[str, object], said: str) -> None:
    given = (
        {"model": fields["model"], "precision": "fp8"} if "model" in fields else TINY | {"precision": "fp8"} | fields
    )
    with pytest.raises(Unsupported, match=f"precision fp8 .*{said}"):
        resolve_step(given)


@pytest.mark.parametrize("precision", ["fp8", "fp8_torchao"])
def test_a_gpu_without_products_of_fp8_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for capability in ((8, 0), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if capability >= (8, 9):
            refuse_unserved(precision, torch.device("cuda"))
            continue
        with pytest.raises(Unsupported, match=f"precision {precision} .* from compute capability 8.9 on; use .* bf16$"):
            refuse_unserved(precision, torch.device("cuda"))
    with pytest.raises(Unsupported, match="mps has no products of fp8"):
        refuse_unserved(precision, torch.device("mps"))


def test_without_torchao_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Unsupported, match=r"^precision fp8_torchao is not supported: .*torchao.*; pip install torchao"):
        products_by_torchao(nn.Sequential())
    with pytest.raises(Unsupported, match=r"fp8_torchao on a CPU .*; use --precision fp8$"):
        refuse_unserved("fp8_torchao", CPU)


# --- what else knows it -----------------------------------------------------------------------------------------------

FAST: dict[str, object] = {
    "model": "2.7b", "context": 2048, "attention": "sdpa_cudnn", "cuda_graph": "step", "block_ops": "triton",
    "optimizer": "adamw_triton", "update": "overlapped",
}  # fmt: skip


@pytest.mark.parametrize("compile_mode", ["off", "block"])
def test_a_plan_has_less_time_for_products_and_the_casts_beside_them(compile_mode: str) -> None:
    gpu = gpu_named("H200 SXM")
    of_bf16, of_fp8 = (
        predict_step_time(resolve_step(FAST | MERGED | {"precision": precision, "compile": compile_mode}), gpu)
        for precision in ("bf16_master", "fp8")
    )
    assert 0.68 < of_fp8.central_s / of_bf16.central_s < 0.78
    products = [part for part in of_fp8.parts if part.what == "_scaled_mm"]
    assert {part.dtype for part in products} == {"fp8"}
    assert sum(part.kernels for part in products) == 32 * 4 * 3
    assert {part.dtype for part in of_fp8.parts if part.kind == "matmul"} == {"fp8", "bf16"}  # the head's
    assert {each.dtype for each in of_fp8.utilizations} == {"bf16"}
    assert of_bf16.is_fitted
    assert not of_fp8.is_fitted
    assert any("not from steps" in note for note in of_fp8.notes)


def recorded() -> dict[tuple[str, str], list[Run]]:
    found: dict[tuple[str, str], list[Run]] = {}
    for gpu, name in RECORDS.items():
        lines = gzip.decompress((ROOT / "benchmarks" / "results" / name).read_bytes()).decode().splitlines()
        for run in map(decode, lines):
            if isinstance(run, Run) and run.spec and run.spec.precision == "fp8" and not run.profile:
                found.setdefault((gpu, run.spec.model.name), []).append(run)
    return found


def test_recorded_steps_that_no_fit_saw_take_as_long_and_as_much_memory_as_planned() -> None:
    """Within 7 % of the time and 1 % of the memory. The chapter has the largest errors, give or take a new fit."""
    chapter = (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8").replace("−", "-")
    row = re.compile(r"^\| (H\d00) \| (\S+) \| (\d+) \| (\S+) % \| (\S+) % \|$", re.MULTILINE)
    said = {(gpu, model): tuple(map(float, figures)) for gpu, model, *figures in row.findall(chapter)}
    assert said.keys() == recorded().keys()
    for (gpu, model), runs in recorded().items():
        times, peaks = [], []
        for run in runs:
            spec = sure(run.spec)
            times.append(100 * (predict_step_time(spec, gpu_named(f"{gpu} SXM")).central_s / sure(run.median_s) - 1))
            peaks.append(100 * (predict_memory(spec).peak_bytes / sure(run.peak).peak_allocated_bytes - 1))
        worst_time, worst_peak = (max(errors, key=abs) for errors in (times, peaks))
        assert abs(worst_time) < 7, model
        assert abs(worst_peak) < 1, model
        steps, time, peak = said[gpu, model]
        assert steps == len(runs)
        assert time == pytest.approx(worst_time, abs=1)
        assert peak == pytest.approx(worst_peak, abs=0.1)


def test_a_plan_refuses_what_it_does_not_know() -> None:
    spec = resolve_step(FAST | MERGED | {"precision": "fp8_torchao"})
    for predict in (predict_memory, lambda spec: predict_step_time(spec, gpu_named("H200 SXM"))):
        with pytest.raises(
            Unsupported, match=r"in fp8_torchao is not supported: .*; use --precision fp8, or measure it"
        ):
            predict(spec)
    with pytest.raises(Unsupported, match="no peak of A100 SXM 80GB is stated in fp8"):
        predict_step_time(resolve_step(FAST | MERGED | {"precision": "fp8"}), gpu_named("A100 SXM 80GB"))


@pytest.mark.release
def test_what_is_saved_for_backward_is_what_a_plan_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def saved_by(num_layers: int, precision: str) -> int:
        step = built(precision, MERGED | {"block_ops": "triton", "attention": "sdpa", "model.num_layers": num_layers})
        weights = {parameter.untyped_storage().data_ptr() for parameter in step.module.parameters()}
        found = dict[int, int]()

        def save(x: Tensor) -> Tensor:
            if x.untyped_storage().data_ptr() not in weights:
                found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            step.forward()
        return sum(found.values())

    def planned(num_layers: int, precision: str) -> int:
        given = {
            "precision": precision,
            "model.num_layers": num_layers,
            "block_ops": "triton",
            "attention": "sdpa_flash",
        }
        return predict_memory(resolve_step(PLANNED | MERGED | given)).at_peak["activations"]

    more = {precision: saved_by(3, precision) - saved_by(2, precision) for precision in ("bf16_master", "fp8")}
    as_planned = {precision: planned(3, precision) - planned(2, precision) for precision in ("bf16_master", "fp8")}
    assert abs((more["fp8"] - more["bf16_master"]) - (as_planned["fp8"] - as_planned["bf16_master"])) < 512


def test_a_walk_tries_it_only_where_it_is_asked_for() -> None:
    spec = resolve_step(TINY | {"precision": "bf16_master", "device": "cuda"})
    for keep_precision in (False, True):
        values = [[change.value for change in changes_for(spec, "cuda", keep_precision=keep_precision, opt_in=opt_in)]
                  for opt_in in ((), ("fp8",))]  # fmt: skip
        assert ["fp8" in each for each in values] == [False, True]
    [change] = [each for each in changes_for(spec, "cuda", keep_precision=False, opt_in=["fp8"]) if each.value == "fp8"]
    assert change.made(spec) == resolve_step(TINY | {"precision": "fp8", "device": "cuda"})
    assert "short runs" in change.numerics
