"""Contenders in turns, on a device whose clocks are told what time it is."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.test_loop import FakeDevice
from torch import Tensor

from steplab.measurement.ddp import turns as ddp_turns
from steplab.measurement.ddp.turns import run_turns
from steplab.measurement.step import loop
from steplab.measurement.step.loop import Phase


class Others:
    """Ranks that are there at once."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def host_gather(self, value: object) -> list[object]:
        if value is None:
            self.device.events.append("barrier")
        return [value]

    def all_reduce(self, tensor: Tensor, *, average: bool) -> Any:
        self.device.events.append("meet")
        return SimpleNamespace(wait=lambda: None)


def world_of(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (loop, ddp_turns):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: device.host_s))
    if device.asynchronous and ddp_turns.LONGEST_HOLD_S == 0.5:
        monkeypatch.setattr(ddp_turns, "LONGEST_HOLD_S", 1000)  # the device's seconds are whole ones
    return SimpleNamespace(device=device, collectives=Others(device))


def phases_of(device: FakeDevice, name: str, launch_s: float, work_s: float) -> list[Phase]:
    return [device.phase(f"{name} {phase}", [(launch_s, work_s)] * 20) for phase in ("forward", "backward")]


def test_a_slow_host_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    world = world_of(device, monkeypatch)
    quick, slow = phases_of(device, "quick", 1, 5), phases_of(device, "slow", 9, 6)
    turns = run_turns([quick, slow], world, 4, 2, lambda step: None)
    found = [samples for samples, _ in turns]
    assert [[samples.device_s for samples in phases] for phases in found] == [
        [(5,) * 4, (5,) * 4, (10,) * 4],
        [(6,) * 4, (6,) * 4, (12,) * 4],
    ]
    assert all(min(samples.lead_s or (0.0,)) > 0 for phases in found for samples in phases)
    assert [held_s for _, held_s in turns] == [1.5 * 2, 1.5 * 18]  # of what Python takes for a step


def test_a_step_in_which_python_stalled_is_made_again_after_a_longer_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    world = world_of(device, monkeypatch)
    stalls = device.phase("stalls", [(1, 0), (1, 0), (90, 0), (1, 0), (1, 0), (1, 0), (1, 0)])
    phases = [device.phase("works", [(1, 5)] * 9), stalls]
    ((samples, held_s),) = run_turns([phases], world, 4, 4, lambda step: None)
    assert samples[2].device_s == (5, 5, 5, 5)  # and not 91
    assert held_s == 1.5 * 91
    assert device.events.count("works") == 1 + 4 + 1


def test_what_other_ranks_say_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank was late once, and takes longer to start a step: this one goes along."""
    device = FakeDevice()
    world = world_of(device, monkeypatch)
    late = iter([True, False, False])

    def host_gather(mine: object) -> list[object]:
        return [mine, next(late) if isinstance(mine, bool) else 40.0]

    world.collectives.host_gather = host_gather
    ((samples, held_s),) = run_turns([[device.phase("whole", [(1.0, 5)] * 9)]], world, 2, 2, lambda step: None)
    assert len(samples[0].best_s) == 2
    assert held_s == 60
    assert device.events.count("whole") == 1 + 2  # it was held for as long as the other rank needs already


def test_no_hold_is_longer_than_has_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(ddp_turns, "LONGEST_HOLD_S", 4)

    def waits() -> None:
        device.host_s += 10
        device.synchronize()

    world = world_of(device, monkeypatch)
    ((_, held_s),) = run_turns([[Phase(name="whole", run=waits)]], world, 3, 3, lambda step: None)
    assert held_s == 4


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
    assert [len(phases[0].best_s) for phases, _ in found] == [2, 2]
    begun = device.events.index("barrier")  # before, each is held once and the ranks meet: the first time takes long
    of_order = ("barrier", "hold", "meet", "a forward", "b forward")
    told = [event for event in device.events[begun:] if event in of_order]
    turn_of = {name: ["barrier", f"{name} forward", "hold", "meet", f"{name} forward"] for name in "ab"}
    assert told == turn_of["a"] + turn_of["b"] + turn_of["b"] + turn_of["a"]


def test_where_the_host_is_the_device_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(asynchronous=False)
    run_turns([phases_of(device, "a", 1, 5)], world_of(device, monkeypatch), 2, 2, lambda step: None)
    assert not {"hold", "meet"} & set(device.events)
