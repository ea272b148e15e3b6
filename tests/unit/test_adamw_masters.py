import copy
import os
import re
from pathlib import Path

import pytest
import torch
from tests.unit.test_adamw import OPTIONS, SHAPES, short_blocks  # noqa: F401
from torch import Tensor, nn

import steplab
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.ops.adamw import OneKernelAdamW, adamw_step, bf16_with_masters
from steplab.ops.errors import Unsupported, UserError
from steplab.specs.resolve import resolve_step

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
BF16 = torch.bfloat16


def masters_of() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(shape).to(BF16) for shape in SHAPES]


def optimizer_of(values: list[Tensor]) -> tuple[list[Tensor], OneKernelAdamW]:
    weights = [value.to(BF16).requires_grad_() for value in values]
    return weights, OneKernelAdamW(weights, masters=dict(zip(weights, values, strict=True)), **OPTIONS)


def take_steps(weights: list[Tensor], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = gradient.to(weight.dtype)
        optimizer.step()


def test_masters_are_the_float32_parameters_of_the_same_gradients_and_weights_are_these_rounded() -> None:
    values = masters_of()
    float32 = [value.clone().requires_grad_() for value in values]
    weights, made = optimizer_of(values)
    take_steps(weights, made, range(1, 4))
    take_steps(float32, OneKernelAdamW(float32, **OPTIONS), range(1, 4))
    for weight, master, parameter in zip(weights, values, float32, strict=True):
        assert made.state[weight]["master"] is master
        assert torch.equal(master, parameter)
        assert torch.equal(weight, master.to(BF16))


def test_a_step_is_as_near_to_float64_as_float32_allows() -> None:
    values = masters_of()
    exact = [value.double() for value in values]
    weights, made = optimizer_of(values)
    take_steps(weights, made, range(1, 2))
    u = torch.finfo(torch.float32).eps / 2
    for master, before, gradient in zip(values, exact, gradients(1), strict=True):
        x, first, second = before.clone(), torch.zeros_like(before), torch.zeros_like(before)
        adamw_step(x, gradient.double(), first, second, step=1, **OPTIONS)
        # Decay and product round the parameter twice and its difference once. The update of lr rounds two moments, a
        # root, two corrections, a quotient and a product.
        assert ((master.double() - x).abs() <= u * (3 * before.abs() + 1e-2 * 10)).all()


def test_where_no_kernel_runs_torchs_operators_do(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel, by_torch = masters_of(), masters_of()
    take_steps(*optimizer_of(by_kernel), range(1, 4))
    monkeypatch.delenv("TRITON_INTERPRET")
    weights, made = optimizer_of(by_torch)
    take_steps(weights, made, range(1, 4))
    torch.testing.assert_close(by_torch, by_kernel, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(weight, master.to(BF16)) for weight, master in zip(weights, by_torch, strict=True))


def test_a_checkpoint_loses_nothing() -> None:
    values = masters_of()
    weights, made = optimizer_of(values)
    take_steps(weights, made, range(1, 3))
    saved = copy.deepcopy(made.state_dict())
    assert all(
        state[name].dtype == torch.float32 for state in saved["state"].values() for name in ("master", "exp_avg")
    )
    others, loaded = optimizer_of([torch.zeros_like(value) for value in values])
    loaded.load_state_dict(saved)
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
    for each, optimizer in ((weights, made), (others, loaded)):
        take_steps(each, optimizer, range(3, 4))
    for weight, other in zip(weights, others, strict=True):
        assert torch.equal(weight, other)
        for name in ("master", "exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(made.state[weight][name], loaded.state[other][name])


def test_the_masters_that_a_caller_holds_are_those_that_are_loaded() -> None:
    values, others = masters_of(), [torch.zeros_like(value) for value in masters_of()]
    weights, made = optimizer_of(values)
    take_steps(weights, made, range(1, 2))
    _, loaded = optimizer_of(others)
    loaded.load_state_dict(made.state_dict())
    saved = [value.clone() for value in values]
    take_steps(weights, made, range(2, 3))
    assert all(torch.equal(other, value) for other, value in zip(others, saved, strict=True))
    assert all(state["master"] is other for state, other in zip(loaded.state.values(), others, strict=True))


def test_a_copy_goes_on_as_the_optimizer_does() -> None:
    weights, made = optimizer_of(masters_of())
    take_steps(weights, made, range(1, 3))
    others, copied = copy.deepcopy((weights, made))
    for each, optimizer in ((weights, made), (others, copied)):
        take_steps(each, optimizer, range(3, 4))
    assert all(torch.equal(weight, other) for weight, other in zip(weights, others, strict=True))


def test_a_checkpoint_goes_to_float32_weights_and_back() -> None:
    values = masters_of()
    weights, made = optimizer_of(values)
    take_steps(weights, made, range(1, 3))
    float32 = [torch.zeros_like(value).requires_grad_() for value in values]
    plain = OneKernelAdamW(float32, **OPTIONS)
    plain.load_state_dict(copy.deepcopy(made.state_dict()))
    assert all(torch.equal(parameter, value) for parameter, value in zip(float32, values, strict=True))
    again, back = optimizer_of([parameter.detach().clone() for parameter in float32])
    back.load_state_dict(copy.deepcopy(plain.state_dict()))
    for each, optimizer in ((weights, made), (float32, plain), (again, back)):
        take_steps(each, optimizer, range(3, 4))
    for weight, parameter, other in zip(weights, float32, again, strict=True):
        assert torch.equal(made.state[weight]["master"], parameter)
        assert torch.equal(other, weight)


def test_values_that_a_weight_was_given_beside_its_master_are_not_lost() -> None:
    """The next step would overwrite them by the master, as if a model is loaded after its optimizer was made."""
    weights, made = optimizer_of(masters_of())
    take_steps(weights, made, range(1, 2))
    with torch.no_grad():
        weights[0].copy_(weights[0].clone())  # the same values
        take_steps(weights, made, range(2, 3))
        weights[0].add_(1)
    given = weights[0].detach().clone()
    for _ in range(2):
        with pytest.raises(UserError, match=r"shape \(700,\) differs from its master, .*: load weights"):
            take_steps(weights, made, range(3, 4))
    float32 = [value.clone().requires_grad_() for value in masters_of()]
    theirs = torch.optim.AdamW(float32, **OPTIONS)
    take_steps(float32, theirs, range(1, 2))
    made.load_state_dict(theirs.state_dict())  # it has no masters
    assert torch.equal(weights[0], given)
    with pytest.raises(UserError, match="differs from its master"):
        take_steps(weights, made, range(3, 4))
    made.state[weights[0]]["master"].copy_(weights[0])
    take_steps(weights, made, range(3, 4))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.tied = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
        self.tied.weight = self.table.weight
        self.inner, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16, bias=False)


def test_linear_layers_alone_are_put_into_bf16() -> None:
    model = Small()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    masters = bf16_with_masters(model, stay=[model.last.weight])
    low = {name for name, parameter in model.named_parameters() if parameter.dtype == BF16}
    assert low == {"inner.weight", "inner.bias"}
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[parameter]: True for parameter in masters} == dict.fromkeys(low, True)  # type: ignore[index]
    assert all(torch.equal(master, values[names[parameter]]) for parameter, master in masters.items())  # type: ignore[index]
    assert not bf16_with_masters(model, stay=[model.last.weight])


@pytest.mark.parametrize(
    ("weight", "master", "said"),
    [
        (torch.zeros(4), torch.zeros(4), "for a weight of torch.float32 is not supported: a weight with a master"),
        (torch.zeros(4, dtype=BF16), torch.zeros(4, dtype=BF16), "for a master of torch.bfloat16"),
        (torch.zeros(4, dtype=BF16), torch.zeros(5), r"a weight of shape \(4,\) was given a master of shape \(5,\)"),
    ],
)
def test_a_master_that_does_not_fit_is_refused(weight: Tensor, master: Tensor, said: str) -> None:
    weight.requires_grad_()
    with pytest.raises(UserError, match=said):
        OneKernelAdamW([weight], masters={weight: master})


def test_a_bf16_weight_added_without_a_master_is_refused_before_the_kernel_reads_it() -> None:
    _, made = optimizer_of(masters_of())
    added = torch.zeros(4, dtype=BF16, requires_grad=True)
    with pytest.raises(Unsupported, match=r"for a parameter of torch\.bfloat16"):
        made.add_param_group({"params": [added]})
    assert len(made.param_groups) == 1


def test_the_loop_of_the_documentation_trains() -> None:
    text = (Path(__file__).parents[2] / "docs" / "precision.md").read_text(encoding="utf-8")
    [loop] = [piece for piece in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "bf16_with_masters" in piece]
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)), torch.randn(8)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    exec(compile(loop, "docs", "exec"), {"model": model, "batch": batch, "device": torch.device("cpu")})
    assert [parameter.dtype for parameter in model.parameters()] == [BF16, BF16, *[torch.float32] * 2, BF16, BF16]
    assert not any(torch.equal(x, y.float()) for x, y in zip(before, model.parameters(), strict=True))


# --- a step in bf16_master, and the same in bf16 -----------------------------------------------------------

TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": 2, "model.d_model": 16, "model.d_ff": 24, "model.num_heads": 2,
    "model.vocab_size": 40, "batch": 2, "context": 8, "device": "cpu", "optimizer": "adamw_triton",
}  # fmt: skip
GPT_2: dict[str, object] = {
    "model.norm": "layernorm", "model.feed_forward": "gelu", "model.biases": "all", "model.learned_positions": 8,
}  # fmt: skip


def trained_step(precision: str, fields: dict[str, object]) -> tuple[ModelStep, list[float]]:
    spec = resolve_step(TINY | fields | {"precision": precision})
    step = ModelStep(build_workload(spec, torch.device("cpu")), spec, torch.device("cpu"))
    losses = []
    for _ in range(4):
        step.forward()
        assert step.loss is not None
        losses.append(float(step.loss.detach()))
        step.backward()
        step.optimizer_step()
    return step, losses


@pytest.mark.parametrize(
    "fields",
    [
        {},
        GPT_2 | {"model.head": "tied"},
        {"model.projections": "merged", "checkpointing": "full"},
        {"loss": "chunked", "context": 24},
    ],
    ids=str,
)
def test_a_step_trains_to_the_bit_what_autocast_over_float32_weights_trains(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and update have equal operands, so no bound is needed."""
    monkeypatch.delenv("TRITON_INTERPRET")  # the update by operators of torch, which is quicker
    step, losses = trained_step("bf16_master", fields)
    autocast, expected = trained_step("bf16", fields)
    assert losses == expected
    assert losses[0] != losses[-1]
    assert step.optimizer is not None
    for (name, weight), parameter in zip(step.module.named_parameters(), autocast.module.parameters(), strict=True):
        is_low = isinstance(step.module.get_submodule(name.rpartition(".")[0]), nn.Linear) and not (
            name == "head.weight" and "loss" in fields
        )
        assert weight.dtype == (BF16 if is_low else torch.float32), name
        assert torch.equal(step.optimizer.state[weight]["master"] if is_low else weight, parameter), name


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": "adamw_fused"}, "with optimizer adamw_fused is not supported: .*; use --optimizer adamw_triton"),
        ({"accumulation": 2}, "with accumulation 2 is not supported: .* in bf16; use --precision bf16"),
        ({"layout": "dp=2"}, "with layout dp=2 is not supported: .* in bf16; use --precision bf16"),
        ({"layout": "fsdp=2", "pass": "forward"}, "with layout fsdp=2 is not supported"),
    ],
)
def test_a_step_that_would_train_otherwise_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(steplab.Unsupported, match=f"precision bf16_master {said}"):
        resolve_step({"precision": "bf16_master", "optimizer": "adamw_triton"} | fields)
    assert resolve_step({"precision": "bf16_master", "pass": "forward_backward"})
