"""AdamW in one kernel on a GPU, beside torch's fused one and float64."""

import pytest
import torch
from torch import Tensor

from steplab.ops.adamw.optimizer import OneKernelAdamW
from steplab.ops.adamw.reference import Rates, adamw_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
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
    for step in range(1, STEPS + 1):
        rates = Rates(lr=1e-2, beta_1=0.9, beta_2=0.999, eps=1e-8, weight_decay=weight_decay, step=step)
        for index, gradient in enumerate(inputs(step)):
            ours[index].grad, theirs[index].grad = gradient, gradient.clone()
            adamw_step(exact[index], gradient.double(), *moments[index], rates)
        for each in made:
            each.step()
    for x, y, z in zip(ours, theirs, exact, strict=True):
        own, torchs = ((t.detach().double() - z).abs().max() for t in (x, y))
        one_rounding = torch.finfo(torch.float32).eps / 2 * z.abs().max()
        assert own <= 2 * torchs + one_rounding


def test_masters_are_the_float32_parameters_of_the_same_gradients_and_weights_are_these_rounded() -> None:
    parameters, masters = inputs(0), inputs(0)
    weights = [master.to(torch.bfloat16).requires_grad_() for master in masters]
    made = OneKernelAdamW(weights, lr=1e-2, masters=dict(zip(weights, masters, strict=True)))
    plain = OneKernelAdamW([x.requires_grad_() for x in parameters], lr=1e-2)
    for step in range(1, STEPS + 1):
        for weight, parameter, gradient in zip(weights, parameters, inputs(step), strict=True):
            weight.grad = gradient.to(torch.bfloat16)
            parameter.grad = weight.grad.float()
        made.step()
        plain.step()
    for weight, master, parameter in zip(weights, masters, parameters, strict=True):
        assert torch.equal(master, parameter)
        assert torch.equal(weight, master.to(torch.bfloat16))


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
