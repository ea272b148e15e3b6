import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import steplab
from steplab.ops import triton_places
from steplab.ops.adamw import OneKernelAdamW, adamw_step
from steplab.ops.errors import Unsupported, UserError
from steplab.ops.update import UpdateByParts
from steplab.plan.memory import predict_memory
from steplab.specs.resolve import resolve_step

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
SHAPES = [(700,), (512,), (3, 5), (), (2, 600), (1,)]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_places, "ADAMW_BLOCK", 256)


def parameters() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(shape) * 10.0 ** (step - 3) for shape in SHAPES]


def in_float64(steps: int) -> list[dict[str, Tensor]]:
    found = []
    for index, parameter in enumerate(parameters()):
        p = parameter.detach().double()
        first, second = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(1, steps + 1):
            adamw_step(p, gradients(step)[index].double(), first, second, step=step, **OPTIONS)
        found.append({"parameter": p, "exp_avg": first, "exp_avg_sq": second})
    return found


def trained(kind: Any, steps: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    given = parameters()
    made = kind(given, **OPTIONS)
    for step in range(1, steps + 1):
        for parameter, gradient in zip(given, gradients(step), strict=True):
            parameter.grad = gradient
        made.step()
    return given, made


def test_steps_are_as_near_to_float64_as_float32_allows() -> None:
    """Each step rounds a moment at most three times, and a parameter by its update's and its own roundings."""
    steps, u = 4, torch.finfo(torch.float32).eps / 2
    given, made = trained(OneKernelAdamW, steps)
    for parameter, exact in zip(given, in_float64(steps), strict=True):
        state = made.state[parameter]
        # Terms of either sign: gradients of the steps before bound what rounding can be of.
        largest = max(float(g.abs().max()) for step in range(1, steps + 1) for g in gradients(step))
        assert (state["exp_avg"].double() - exact["exp_avg"]).abs().max() <= 4 * steps * u * largest
        assert (state["exp_avg_sq"].double() - exact["exp_avg_sq"]).abs().max() <= 4 * steps * u * largest**2
        off = (parameter.detach().double() - exact["parameter"]).abs()
        ratio = largest * exact["exp_avg_sq"].clamp(min=1e-30).rsqrt()  # by how much a moment's error counts
        assert (off <= steps * u * (4 * exact["parameter"].abs() + 1e-2 * 40 * (1 + ratio + ratio**2))).all()


def test_torchs_own_is_as_near() -> None:
    ours, _ = trained(OneKernelAdamW, 3)
    theirs, _ = trained(torch.optim.AdamW, 3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_state_goes_from_torchs_and_back() -> None:
    given, made = trained(torch.optim.AdamW, 2)
    ours = [parameter.detach().clone().requires_grad_() for parameter in given]
    loaded = OneKernelAdamW(ours, **OPTIONS)
    loaded.load_state_dict(copy.deepcopy(made.state_dict()))
    for parameter, other, gradient in zip(given, ours, gradients(3), strict=True):
        parameter.grad, other.grad = gradient, gradient.clone()
    made.step()
    loaded.step()
    torch.testing.assert_close(ours, given, rtol=1e-5, atol=1e-6)
    back = torch.optim.AdamW([parameter.detach().clone().requires_grad_() for parameter in ours], **OPTIONS)
    back.load_state_dict(loaded.state_dict())
    assert {int(state["step"]) for state in back.state.values()} == {3}


def test_what_has_no_gradient_stays_and_counts_its_own_steps() -> None:
    first, second = torch.ones(300, requires_grad=True), torch.ones(20, requires_grad=True)
    made = OneKernelAdamW([first, second], **OPTIONS)
    first.grad = torch.ones(300)
    made.step()
    assert torch.equal(second, torch.ones(20))
    second.grad = torch.ones(20)
    made.step()
    assert (int(made.state[first]["step"]), int(made.state[second]["step"])) == (2, 1)
    alone = torch.ones(20, requires_grad=True)
    alone.grad = torch.ones(20)
    OneKernelAdamW([alone], **OPTIONS).step()
    assert torch.equal(alone, second)


def test_gradients_may_be_elsewhere_in_every_step_and_groups_have_their_own_rates() -> None:
    given = parameters()
    made = OneKernelAdamW([{"params": given[:2]}, {"params": given[2:], "lr": 0.0, "weight_decay": 0.5}], **OPTIONS)
    before = [parameter.detach().clone() for parameter in given]
    kept = []
    for step in (1, 2):
        for parameter, gradient in zip(given, gradients(step), strict=True):
            parameter.grad = gradient
            kept.append(gradient)
        made.step()
    assert all(not torch.equal(one, other) for one, other in zip(given[:2], before[:2], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(given[2:], before[2:], strict=True))


@pytest.mark.parametrize("kind", [OneKernelAdamW, torch.optim.AdamW])
def test_parts_updated_one_after_the_other_are_those_of_one_step(kind: Any) -> None:
    found = []
    for parts in ([range(6)], [range(4, 6), range(1), range(1, 4)]):
        given, stranger = parameters(), torch.ones(3, requires_grad=True)
        made = kind([{"params": given[:3]}, {"params": given[3:], "lr": 0.5}], **OPTIONS)
        update = UpdateByParts(made)
        for step in (1, 2, 3):
            for parameter, gradient in zip(given, gradients(step), strict=True):
                parameter.grad = gradient
            stranger.grad = torch.ones(3)
            for part in parts:
                update.of([*(given[index] for index in part), stranger])
        assert [len(group["params"]) for group in made.param_groups] == [3, 3]
        assert torch.equal(stranger, torch.ones(3))
        found.append((given, made.state_dict()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (
            torch.zeros(8, dtype=torch.bfloat16),
            "for a parameter of torch.bfloat16 is not supported: without a master it updates float32 .*; use torch",
        ),
        (torch.zeros(8, 8).t()[1:], "takes contiguous tensors"),
        (torch.zeros(9)[1:], "multiple of 16 bytes"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(tensor: Tensor, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        OneKernelAdamW([tensor.requires_grad_()])
    with pytest.raises(UserError, match="betas from 0 to below 1"):
        OneKernelAdamW([torch.zeros(4, requires_grad=True)], betas=(0.9, 1.0))


def test_tensors_of_other_devices_are_updated_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch would read addresses of another device."""
    given = [torch.ones(4, device=device, requires_grad=True) for device in ("cpu", "meta", "cpu")]
    for each in given:
        each.grad = torch.ones_like(each)
    together: list[set[str]] = []

    def seen(self: OneKernelAdamW, tensors: Any, group: object, **options: object) -> None:
        together.append({tensor.device.type for each in tensors for tensor in each})

    monkeypatch.setattr(OneKernelAdamW, "_update", seen)
    OneKernelAdamW(given, **OPTIONS).step()
    assert together == [{"cpu"}, {"meta"}]


def test_tables_do_not_grow_with_the_number_of_gradients() -> None:
    given = [torch.ones(4, requires_grad=True) for _ in range(8)]
    made = OneKernelAdamW(given, **OPTIONS)
    for number in range(8, 0, -1):
        for each in given:
            each.grad = None
        for each in given[:number]:
            each.grad = torch.ones(4)
        made.step()
    assert len(made._tables) == 1
    assert [int(made.state[each]["step"]) for each in given] == [8, 7, 6, 5, 4, 3, 2, 1]


def test_a_capture_of_other_tensors_than_the_step_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables have that step's sizes: the kernel would pass the end of a smaller tensor."""
    first, large, small = given = [torch.ones(size, requires_grad=True) for size in (8, 600, 8)]
    made = OneKernelAdamW(given, **OPTIONS)
    first.grad, small.grad = torch.ones(8), torch.ones(8)
    made.step()
    with monkeypatch.context() as patched:
        patched.setattr("steplab.ops.adamw._is_captured", lambda tensor: True)
        large.grad = torch.ones(600)
        with pytest.raises(Unsupported, match="a parameter has no moments yet"):
            made.step()
        assert large not in made.state or not made.state[large]
    small.grad = None
    made.step()
    monkeypatch.setattr("steplab.ops.adamw._is_captured", lambda tensor: True)
    large.grad, small.grad = None, torch.ones(8)
    with pytest.raises(Unsupported, match="the previous step was of other parameters"):
        made.step()
    small.grad, large.grad = None, torch.ones(601)[1:]
    with pytest.raises(Unsupported, match="begin at a multiple of 16 bytes"):
        made.step()


def test_tensors_without_an_address_of_their_own_are_refused() -> None:
    """The kernel would read address 0 of a sharded parameter (DTensor)."""
    with pytest.raises(Unsupported, match="for a TwoTensor is not supported: its elements are in tensors within it"):
        OneKernelAdamW([TwoTensor(torch.ones(4), torch.ones(4)).requires_grad_()])
    table = torch.nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(Unsupported, match="for a sparse gradient"):
        OneKernelAdamW(table.parameters()).step()


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "with amsgrad is not supported"),
        (torch.optim.AdamW, {"maximize": True}, "with maximize is not supported"),
        (torch.optim.Adam, {}, "with Adam's weight decay is not supported"),
    ],
)
def test_the_state_of_another_update_is_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    given = parameters()
    saved = kind(given, **OPTIONS, **options).state_dict()
    with pytest.raises(Unsupported, match=said):
        OneKernelAdamW(given, **OPTIONS).load_state_dict(saved)
    if options:
        with pytest.raises(Unsupported, match=said):
            OneKernelAdamW([{"params": given} | options])


def test_what_it_keeps_on_the_device_is_what_a_plan_says() -> None:
    made = OneKernelAdamW(given := parameters(), **OPTIONS)
    for parameter, gradient in zip(given, gradients(1), strict=True):
        parameter.grad = gradient
    made.step()
    (tables,) = made._tables.values()
    blocks = sum(-(-parameter.numel() // 256) for parameter in given)
    kept = (tables.addresses, tables.counts, tables.firsts, tables.tensors, tables.rates, tables.settings.on_device)
    number = len(given)
    assert [table.nbytes for table in kept] == [40 * number, 8 * number, 8 * number, 4 * blocks, 12 * number, 32]


@pytest.mark.parametrize("fields", [{"precision": "bf16_pure"}, {"layout": "fsdp=2"}, {"layout": "tp=2"}])
def test_a_step_that_it_does_not_serve_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(steplab.Unsupported, match=r"optimizer adamw_triton with .* use adamw_fused"):
        resolve_step({"optimizer": "adamw_triton"} | fields)
    assert resolve_step({"pass": "forward", "optimizer": "adamw_triton", "precision": "bf16_pure"})


def test_memory_on_a_layout_is_refused_by_name() -> None:
    with pytest.raises(steplab.Unsupported, match="on layout dp=2 with optimizer adamw_triton is not supported"):
        predict_memory(resolve_step({"optimizer": "adamw_triton", "layout": "dp=2"}))
