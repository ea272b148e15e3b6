"""When attention's functions are called through torch's operators, and when at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from steplab.ops.attention import operators


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def called() -> list[str]:
    """Which of the two was called."""
    return []


@pytest.fixture
def call(called: list[str]) -> Callable[..., Any]:
    """An operator and its function, of one tensor and two settings."""

    def noting(name: str) -> Any:
        return lambda x, causal, scale: called.append(name)

    return operators._called(noting("operator"), noting("function"), 1)


@pytest.mark.parametrize(
    ("context", "through"),
    [
        (nullcontext, "function"),
        (torch.enable_grad, "operator"),
        (lambda: FlopCounterMode(display=False), "operator"),
        (lambda: profile(activities=[ProfilerActivity.CPU]), "operator"),
    ],
    ids=["nobody", "autograd", "a mode", "a profiler"],
)
def test_operators_are_called_where_somebody_sees_them(
    context: Callable[[], AbstractContextManager[Any]],
    through: str,
    call: Callable[..., Any],
    called: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "_is_plain", lambda x: True)
    with torch.no_grad(), context():
        call(torch.zeros(1), True, 1.0)
    assert called == [through]


def test_a_transform_of_torch_func_sees_operators(
    call: Callable[..., Any], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(x: Tensor) -> Tensor:
        call(x, True, 1.0)
        return x

    monkeypatch.setattr(operators, "_is_plain", lambda x: True)
    with torch.no_grad():
        torch.func.vmap(attend)(torch.zeros(2, 3))
    assert called == ["operator"]


@torch.no_grad()
def test_other_tensors_than_plain_ones_of_a_gpu_go_through_operators(
    call: Callable[..., Any], called: list[str]
) -> None:
    """Those on a CPU, of a class of their own, and those whose memory does not hold their values."""
    negative = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for x in (torch.zeros(1), torch.zeros(1).as_subclass(OnGpu), negative, torch._efficientzerotensor((1,))):
        call(x, True, 1.0)
    assert called == ["operator"] * 4
