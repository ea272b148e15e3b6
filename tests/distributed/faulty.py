"""Models for `package.module:function`, with which one rank of several comes to grief in its third step."""

import os
import signal
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

FAULTY_RANK = 1
FAULTY_STEP = 3


class _Faulty(nn.Module):
    """A little linear model that calls `fault` on one rank."""

    def __init__(self, fault: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._fault = fault
        self._step = 0

    def forward(self, batch: Tensor) -> Tensor:
        self._step += 1
        if self._step == FAULTY_STEP and os.environ["RANK"] == str(FAULTY_RANK):
            self._fault()
        return self.linear(batch).square().mean()


def _built(fault: Callable[[], None]) -> tuple[nn.Module, Callable[[], Tensor]]:
    return _Faulty(fault), lambda: torch.randn(2, 4)


def out_of_memory() -> tuple[nn.Module, Callable[[], Tensor]]:
    def fault() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return _built(fault)


def raises() -> tuple[nn.Module, Callable[[], Tensor]]:
    def fault() -> None:
        raise ValueError("the third batch is spoilt")

    return _built(fault)


def killed() -> tuple[nn.Module, Callable[[], Tensor]]:
    return _built(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs() -> tuple[nn.Module, Callable[[], Tensor]]:
    return _built(lambda: time.sleep(600))


def stopped() -> tuple[nn.Module, Callable[[], Tensor]]:
    return _built(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def whole_step() -> Callable[[], None]:
    return lambda: None
