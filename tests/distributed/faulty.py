import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

FAULTY_RANK = 1
FAULTY_STEP = 3


class _Faulty(nn.Module):
    def __init__(self, fault: Callable[[], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._fault = fault
        self._step = 0

    def forward(self, batch: Tensor) -> Tensor:
        self._step += 1
        if self._step == FAULTY_STEP and os.environ["RANK"] == str(FAULTY_RANK):
            self._fault()
        return self.linear(batch).square().mean()


def _built(fault: Callable[[], object], device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    return _Faulty(fault), lambda: torch.randn(2, 4, device=device)


def out_of_memory(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model raises a GPU's error on a CPU, whose kernel may overcommit."""

    def fault() -> None:
        if device.type == "cuda":
            torch.empty(1 << 46, dtype=torch.uint8, device=device)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return _built(fault, device)


def raises(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    def fault() -> None:
        raise ValueError("the third batch is spoilt")

    return _built(fault, device)


def killed(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    return _built(lambda: os.kill(os.getpid(), signal.SIGKILL), device)


def hangs(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    return _built(lambda: time.sleep(600), device)


def held(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Waits while the working folder has a file `hold`; it writes a file `reached`."""

    def fault() -> None:
        Path("reached").touch()
        while Path("hold").exists():
            time.sleep(0.01)

    return _built(fault, device)


def whole_step() -> Callable[[], None]:
    return lambda: None
