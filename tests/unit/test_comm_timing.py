"""How a collective is timed, on a device whose clocks are told what time it is."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tests.unit.test_loop import FakeDevice
from torch import Tensor

from steplab.measurement.comm import timing as comm_timing
from steplab.measurement.comm.back_to_back import Together, back_to_back
from steplab.measurement.comm.timing import time_calls
from steplab.measurement.step import loop
from steplab.records.comm import RankTimes
from steplab.specs.comm import CommSpec, CommStudy

LAUNCH_S, WORK_S, BARRIER_S = 1, 8, 2


class Alone:
    """Collectives of a rank that is the slowest, or has a slower one beside it."""

    rank, size = 1, 2

    def __init__(self, device: FakeDevice, others_s: float = 0.0) -> None:
        self.device, self.others_s, self.agreed = device, others_s, 0
        self.others_late: Iterator[bool] = iter(())

    def host_maximum(self, values: Tensor) -> Tensor:
        if values.tolist() == [0]:
            self.device.events.append("barrier")
            self.device.host_s += BARRIER_S
        else:
            self.agreed += 1
        return torch.maximum(values, torch.tensor([int(self.others_s * 1e9)]))

    def host_gather(self, value: object) -> list[object]:
        return [value, next(self.others_late, False) if isinstance(value, bool) else value]

    def all_reduce(self, tensor: Tensor, *, average: bool) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)


def clocked(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    for module in (loop, comm_timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: device.host_s))


def timed(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, others_s: float = 0.0) -> tuple[RankTimes, int]:
    """A rank's times, and how many calls it made."""
    clocked(monkeypatch, device)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        device.phase("call", [(LAUNCH_S, WORK_S)]).run()

    study = CommStudy(
        cells=(CommSpec(),), num_processes=2, warmup_s=85.0, measured_s=120.0, least_repeats=4, most_repeats=30
    )
    collectives = Alone(device, others_s)
    times = time_calls(call, Together(device=device, collectives=collectives), study)  # type: ignore[arg-type]
    return times, calls


def test_calls_go_back_to_back_after_one_barrier_and_then_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    times, calls = timed(monkeypatch, device)
    # Five calls take 41 s, so that eleven warm it up; 120 s are 14 of those eleven's mean. A row more is tried before.
    assert calls == 5 + 6 + (5 + 1) + (14 + 1) + 14
    assert times.rank == 1
    assert times.device_s == (WORK_S,) * 14  # the host runs ahead
    assert times.alone_s == (LAUNCH_S + WORK_S,) * 14  # and here it waits for each
    assert (times.calls_per_sample, times.num_waits) == (1, 0)
    assert times.best_s == times.device_s
    loop_events = device.events[device.events.index("reserve marks") :]
    assert loop_events.count("barrier") == 1 + 14  # one before the row, and one before each call by itself
    first = loop_events.index("barrier")
    row = loop_events[first : loop_events.index("barrier", first + 1)]
    calls_at = [place for place, event in enumerate(row) if event == "call"]
    assert len(calls_at) == 14 + 1
    assert "synchronize" not in row[calls_at[0] : calls_at[-1]]  # nothing is waited for between two calls


def test_the_slowest_rank_says_how_many_calls_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    times, calls = timed(monkeypatch, FakeDevice(), others_s=40.0)
    assert (
        calls == 5 + 2 + (5 + 1) + (4 + 1) + 4
    )  # 40 s a call: warm when two batches agree, and the least number of repeats
    assert len(times.alone_s) == 4


def test_a_call_is_warm_when_it_no_longer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(asynchronous=False)
    clocked(monkeypatch, device)
    costs = [100.0] * 5 + [40.0] * 2 + [10.0] * 500  # first calls, then two processes on one core, then settled

    def call() -> None:
        device.host_s += costs.pop(0)

    study = CommStudy(cells=(CommSpec(),), num_processes=2, warmup_s=400.0, measured_s=100.0, most_repeats=50)
    times = time_calls(call, Together(device=device, collectives=Alone(device)), study)  # type: ignore[arg-type]
    assert set(times.alone_s) == {10.0}
    assert len(times.alone_s) == 10

    never = iter(range(1, 10**6))  # each call twice as long, or half as long, as the one before it

    def restless() -> None:
        device.host_s += 10.0 if next(never) & 64 else 30.0

    time_calls(restless, Together(device=device, collectives=Alone(device)), study)  # type: ignore[arg-type]
    assert next(never) < 600, "it is given up after ten times the warm-up"


def test_a_host_that_is_the_device_is_timed_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times, _ = timed(monkeypatch, FakeDevice(asynchronous=False))
    assert times.device_s is None
    assert times.num_waits is None
    assert times.best_s == times.alone_s == (LAUNCH_S + WORK_S,) * len(times.alone_s)


def rows_of(
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    costs: list[tuple[float, float]],
    samples: int,
    *,
    waits: bool = False,
) -> RankTimes:
    """Calls of these (launch, work) seconds in rows; `waits`: each waits for the device itself."""
    clocked(monkeypatch, device)
    phase = device.phase("call", costs)

    def call() -> None:
        phase.run()
        if waits:
            device.synchronize()

    together = Together(device=device, collectives=Alone(device))  # type: ignore[arg-type]
    return back_to_back(call, together, lambda calls: samples)


def test_the_call_in_which_ranks_wait_for_each_other_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = rows_of(FakeDevice(), monkeypatch, [(1, 500), *[(1, 8)] * 5] * 2, 5)
    assert times.device_s == pytest.approx((8,) * 5)


def test_a_device_that_would_wait_for_python_is_held_before_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    times = rows_of(device, monkeypatch, [(400e-6, 120e-6)] * 10_000, 30)
    assert times.device_s == pytest.approx((120e-6,) * 30)
    assert (times.calls_per_sample, times.num_waits) == (9, 0)  # a millisecond's worth
    # Python takes 2.4 ms for 6 calls and 80 ms for 199: each row is made twice. The last has 8 samples.
    assert times.held_s == pytest.approx(1.5 * 199 * 400e-6)
    assert device.events.count("call") == 2 * 6 + 2 * 199 + 73


def test_another_ranks_wait_has_the_row_made_again_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    clocked(monkeypatch, device)
    phase = device.phase("call", [(1e-3, 2e-3)] * 100)
    together = Together(device=device, collectives=Alone(device, others_s=0.25e-3))  # type: ignore[arg-type]
    together.collectives.others_late = iter([False, True])  # type: ignore[attr-defined]
    times = back_to_back(phase.run, together, lambda calls: 3)
    assert (len(times.device_s or ()), times.num_waits) == (3, 0)
    assert device.events.count("call") == 6 + 4 + 4


def test_the_slowest_ranks_time_says_how_many_calls_a_sample_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    clocked(monkeypatch, device)
    phase = device.phase("call", [(10e-6, 120e-6)] * 1000)
    together = Together(device=device, collectives=Alone(device, others_s=0.25e-3))  # type: ignore[arg-type]
    assert back_to_back(phase.run, together, lambda calls: 3).calls_per_sample == 4


def test_a_call_that_waits_itself_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    times = rows_of(device, monkeypatch, [(1, 8)] * 100, 3, waits=True)
    assert times.device_s == (9, 9, 9)
    assert times.num_waits == 3
    assert device.events.count("call") == 6 + 6 + 4  # tried without a hold, and in vain with the longest
