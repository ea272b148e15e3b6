"""Contenders in turns, on a device whose clocks are told what time it is."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.test_loop import FakeDevice
from torch import Tensor

from steplab.measurement import ddp_turns, loop
from steplab.measurement.ddp_turns import run_turns
from steplab.measurement.loop import Phase


class Others:
    """Ranks that are there at once."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def host_gather(self, value: object) -> list[object]:
        self.device.events.append("barrier")
        return [value]

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Any:
        self.device.events.append("meet")
        return SimpleNamespace(wait=lambda: None)


def world_of(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (loop, ddp_turns):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: device.host_s))
    return SimpleNamespace(device=device, collectives=Others(device))


def phases_of(device: FakeDevice, name: str, launch_s: float, work_s: float) -> list[Phase]:
    return [device.phase(f"{name} {phase}", [(launch_s, work_s)] * 20) for phase in ("forward", "backward")]


def test_a_slow_host_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    world = world_of(device, monkeypatch)
    quick, slow = phases_of(device, "quick", 1, 5), phases_of(device, "slow", 9, 6)
    found = run_turns([quick, slow], world, 4, 2, lambda step: None)
    assert [[samples.device_s for samples in phases] for phases in found] == [
        [(5,) * 4, (5,) * 4, (10,) * 4],
        [(6,) * 4, (6,) * 4, (12,) * 4],
    ]
    assert all(min(samples.lead_s or (0.0,)) > 0 for phases in found for samples in phases)


def test_a_turn_begins_with_a_step_that_is_not_counted_and_each_step_with_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    found = run_turns(
        [phases_of(device, "a", 1, 5), phases_of(device, "b", 1, 5)],
        world_of(device, monkeypatch),
        2,
        1,
        lambda step: None,
    )
    assert [len(phases[0].best_s) for phases in found] == [2, 2]
    told = [event for event in device.events if event in ("barrier", "hold", "meet") or event.endswith("forward")]
    turn_of = {name: ["barrier", f"{name} forward", "hold", "meet", f"{name} forward"] for name in "ab"}
    assert told == turn_of["a"] + turn_of["b"] + turn_of["b"] + turn_of["a"]


def test_where_the_host_is_the_device_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(asynchronous=False)
    run_turns([phases_of(device, "a", 1, 5)], world_of(device, monkeypatch), 2, 2, lambda step: None)
    assert not {"hold", "meet"} & set(device.events)
