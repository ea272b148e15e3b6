from typing import Any

import pytest
import torch
from torch import Tensor

from steplab.ops.adamw import OneKernelAdamW, adamw_step
from steplab.ops.errors import Unsupported

SHAPES = [(4096, 511), (1024,), (1,), (3, 5), (100_003,), (2048, 2)]
STEPS = 5


def inputs(step: int) -> list[Tensor]:
    torch.manual_seed(step)
    return [torch.randn(shape, device="cuda") for shape in SHAPES]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_errs_no_more_than_twice_as_much_as_torchs_fused_one(weight_decay: float) -> None:
    ours, theirs, exact = ([x.clone() for x in inputs(0)] for _ in range(3))
    exact = [x.double() for x in exact]
    moments = [(torch.zeros_like(x), torch.zeros_like(x)) for x in exact]
    made = [
        OneKernelAdamW([x.requires_grad_() for x in ours], lr=1e-2, weight_decay=weight_decay),
        torch.optim.AdamW([x.requires_grad_() for x in theirs], lr=1e-2, weight_decay=weight_decay, fused=True),
    ]
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
    for step in range(1, STEPS + 1):
        for index, gradient in enumerate(inputs(step)):
            ours[index].grad, theirs[index].grad = gradient, gradient.clone()
            adamw_step(exact[index], gradient.double(), *moments[index], step=step, **options)
        for each in made:
            each.step()
    for x, y, z in zip(ours, theirs, exact, strict=True):
        own, torchs = ((t.detach().double() - z).abs().max() for t in (x, y))
        one_rounding = torch.finfo(torch.float32).eps / 2 * z.abs().max()
        assert own <= 2 * torchs + one_rounding


def test_more_than_two_to_the_31_elements_are_updated_to_the_last() -> None:
    count = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 5 * 4 * count:
        pytest.skip("needs 43 GB of GPU memory")
    parameter = torch.ones(count, device="cuda").requires_grad_()
    parameter.grad = torch.ones(count, device="cuda")
    OneKernelAdamW([parameter], lr=0.5, weight_decay=0.0).step()
    with torch.no_grad():
        torch.testing.assert_close(parameter[-3:], torch.full((3,), 0.5, device="cuda"))
        torch.testing.assert_close(parameter[:3], torch.full((3,), 0.5, device="cuda"))
        assert parameter.min() == parameter.max()


def trained(*, captured: bool, lr: float | Tensor) -> tuple[list[Tensor], torch.optim.Optimizer]:
    given = [x.requires_grad_() for x in inputs(0)]
    static = [torch.empty_like(x) for x in given]
    made = OneKernelAdamW(given, lr=lr, weight_decay=0.1)

    def step() -> None:
        for parameter, gradient in zip(given, static, strict=True):
            parameter.grad = gradient.clone()  # elsewhere in the graph than outside of it
        made.step()
        made.zero_grad(set_to_none=True)

    run = step
    for number in range(STEPS + 1):
        for gradient, fresh in zip(static, inputs(number + 1), strict=True):
            gradient.copy_(fresh)
        if captured and number == 1:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        run()
        if isinstance(lr, Tensor) and number == 2:
            lr.mul_(0.5)
    torch.cuda.synchronize()
    return given, made


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_replayed_graph_gives_what_steps_outside_of_one_give_and_counts_them(tensor_lr: bool) -> None:
    def rate() -> float | Tensor:
        return torch.tensor(1e-2, device="cuda", dtype=torch.float64) if tensor_lr else 1e-2

    (plain, before), (replayed, after) = (trained(captured=captured, lr=rate()) for captured in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(plain, replayed, strict=True))
    for x, y in zip(plain, replayed, strict=True):
        assert int(after.state[y]["step"]) == int(before.state[x]["step"]) == STEPS + 1
        assert torch.equal(after.state[y]["exp_avg_sq"], before.state[x]["exp_avg_sq"])


def test_a_first_step_in_a_capture_and_a_second_capture_are_refused() -> None:
    parameter = torch.ones(8, device="cuda", requires_grad=True)
    parameter.grad = torch.ones(8, device="cuda")
    made = OneKernelAdamW([parameter], lr=1e-2)
    made.step()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        made.step()
    with pytest.raises(Unsupported, match="take a step before each"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        made.step()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_group_may_have_parameters_of_several_devices() -> None:
    """Each launch is for one device, whose kernel cannot read another's memory."""
    devices = ("cuda:0", "cuda:1", "cuda:0")
    given, theirs = (
        [torch.linspace(-1, 1, 700, device=device).requires_grad_() for device in devices] for _ in range(2)
    )
    ours, torchs = OneKernelAdamW(given, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(STEPS):
        for parameters in (given, theirs):
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + step + 1))
        ours.step()
        torchs.step()
    for parameter, expected in zip(given, theirs, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-6)
