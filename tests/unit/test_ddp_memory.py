"""What a contender holds, by whose it is, where some of it lies outside of the allocator that counts."""

from unittest import mock

import torch
from torch import nn

from steplab.measurement.ddp import memory as ddp_memory
from steplab.measurement.ddp.memory import state_memory
from steplab.measurement.machine.device import open_device
from steplab.records.ddp import StateMemory

OTHERS, OWN, SHARED = 5000, 40, 1000
"""Bytes: of other contenders, of this one that are neither parameters nor gradients, and shared with other ranks."""


def test_what_is_shared_is_other_until_gradients_lie_in_it() -> None:
    module = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(module.parameters())
    shared = torch.zeros(SHARED, dtype=torch.uint8)

    def held() -> StateMemory:
        counted = OTHERS + OWN + 4 * 16
        with mock.patch.object(ddp_memory, "allocated_bytes", return_value=counted):
            return state_memory(
                "now", module, optimizer, open_device("cpu"), before_bytes=OTHERS, uncounted_bytes=SHARED
            )

    before = held()
    module.weight.grad = shared[:64].view(torch.float32).view(4, 4)
    after = held()
    assert [memory.allocated_bytes for memory in (before, after)] == [OWN + 64 + SHARED] * 2
    assert (before.gradients_bytes, before.other_bytes) == (0, OWN + SHARED)
    assert (after.gradients_bytes, after.other_bytes) == (SHARED, OWN)
