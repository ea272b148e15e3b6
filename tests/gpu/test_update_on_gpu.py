from typing import Any

import torch
from torch import Tensor, nn

from steplab.ops.update import UpdateInBackward

LATE_CYCLES = 50_000_000


class LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sleep: Any = torch.cuda._sleep
        sleep(LATE_CYCLES)
        return gradient.clone()


def trained(*, overlapped: bool) -> list[Tensor]:
    late: Any = LateGradient.apply
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, bias=False, device="cuda") for _ in range(2)]
    x, aside = torch.randn(64, 256, device="cuda"), torch.cuda.Stream()
    optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.1)
    update = UpdateInBackward(optimizer, [nn.ModuleList(layers)]) if overlapped else None
    for _ in range(3):
        here = torch.cuda.current_stream()
        near = layers[0](x)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            far = late(layers[1](x))
        here.wait_stream(aside)
        (near.square().mean() + far.square().mean()).backward()
        if update is None:
            optimizer.step()
        else:
            update.finish()
        optimizer.zero_grad()
    return [layer.weight.detach().clone() for layer in layers]


def test_an_update_waits_for_gradients_on_every_stream() -> None:
    """The late gradient's hook comes first, its module's last hook on another stream."""
    assert all(torch.equal(*pair) for pair in zip(trained(overlapped=True), trained(overlapped=False), strict=True))
