from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from steplab.measurement.clock import Phase, run_back_to_back, run_synchronised
from steplab.measurement.machine.device import Device
from steplab.records.memory import PeakMemory
from steplab.records.timing import PhaseSamples


class FakeDevice(Device):
    """A device with a queue: a phase costs the host a launch and the device some work, which may continue alone. Times
    are whole seconds, so sums are exact.
    """

    torch_device = torch.device("cpu")

    def __init__(self, *, asynchronous: bool = True, peaks: list[tuple[int, int]] | None = None) -> None:
        self.asynchronous = asynchronous
        self.host_s = 1000.0
        self.free_from_s = 0.0
        self.events: list[str] = []
        self.reserved = 0
        self._peaks = iter(peaks or [])

    def reserve_marks(self, count: int) -> None:
        self.events.append("reserve marks")
        self.reserved = count

    def mark(self) -> float:
        self.events.append("mark")
        if not self.asynchronous:
            return self.host_s
        return max(self.free_from_s, self.host_s)

    def has_passed(self, mark: float) -> bool:
        return mark <= self.host_s

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        self.events.append("synchronize")
        self.host_s = max(self.host_s, self.free_from_s)

    def hold(self, seconds: float) -> None:
        self.events.append("hold")
        self.free_from_s = max(self.free_from_s, self.host_s) + seconds

    def reset_peak(self) -> None:
        self.events.append("reset peak")

    def peak(self, phase: str) -> PeakMemory | None:
        self.events.append(f"peak of {phase}")
        allocated, reserved = next(self._peaks, (None, None))
        if allocated is None or reserved is None:
            return None
        return PeakMemory(phase=phase, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)

    def free_unused(self) -> None:
        self.events.append("free unused")

    def phase(self, name: str, costs: Sequence[tuple[float, float]]) -> Phase:
        remaining = iter(costs)

        def run() -> None:
            self.events.append(name)
            launch_s, work_s = next(remaining)
            self.host_s += launch_s
            if self.asynchronous:
                self.free_from_s = max(self.free_from_s, self.host_s) + work_s
            else:
                self.host_s += work_s

        return Phase(name=name, run=run)

    def on_step(self, iteration: int) -> None:
        self.events.append(f"step {iteration} given")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDevice]:
    def make(*, asynchronous: bool = True, peaks: list[tuple[int, int]] | None = None) -> FakeDevice:
        made = FakeDevice(asynchronous=asynchronous, peaks=peaks)
        clock = SimpleNamespace(perf_counter=lambda: made.host_s, perf_counter_ns=lambda: int(made.host_s * 10**9))
        monkeypatch.setattr("steplab.measurement.clock.time", clock)
        return made

    return make


Make = Callable[..., FakeDevice]


# --- back to back -----------------------------------------------------------------------------------------


def test_a_head_start_is_before_the_first_step_and_no_part_of_it(device: Make) -> None:
    fake = device()
    phases = [fake.phase("forward", [(3, 1)] * 2)]
    slow, _ = run_back_to_back(phases, fake, 2, fake.on_step)
    assert [samples.device_s for samples in slow] == [(4, 3)] * 2  # of the work and of the step: the host's
    phases = [fake.phase("forward", [(3, 1)] * 2)]
    ahead, host_s = run_back_to_back(phases, fake, 2, fake.on_step, head_start=lambda: fake.hold(6))
    assert [samples.device_s for samples in ahead] == [(1, 1)] * 2
    assert [samples.lead_s for samples in ahead] == [(4, 2)] * 2
    assert host_s == 6 + 2


def test_back_to_back_steps_are_never_waited_for(device: Make) -> None:
    fake = device()
    phases = [fake.phase("forward", [(1, 5)] * 2), fake.phase("backward", [(1, 5)] * 2)]
    run_back_to_back(phases, fake, 2, fake.on_step, before_drain=lambda: fake.events.append("drain"))
    step = ["forward", "mark", "backward", "mark"]
    assert fake.events == [
        "reserve marks",
        "synchronize",
        "mark",
        *step,
        "step 0 given",
        *step,
        "step 1 given",
        "drain",
        "synchronize",
    ]


@pytest.mark.parametrize(("num_phases", "iterations"), [(1, 0), (1, 3), (3, 4)])
def test_as_many_marks_are_prepared_as_are_made(device: Make, num_phases: int, iterations: int) -> None:
    fake = device()
    phases = [fake.phase(f"phase {index}", [(1, 1)] * iterations) for index in range(num_phases)]
    run_back_to_back(phases, fake, iterations, fake.on_step)
    assert fake.reserved == fake.events.count("mark") == num_phases * iterations + 1


def test_the_steps_leave_no_gap_between_them(device: Make) -> None:
    fake = device()
    forward, backward = [(3, 8), (20, 1), (3, 2)], [(9, 1), (1, 32), (1, 64)]
    phases = [fake.phase("forward", forward), fake.phase("backward", backward)]
    samples, host_s = run_back_to_back(phases, fake, 3, fake.on_step)
    assert sum(samples[-1].best_s) == host_s
    assert sum(samples[0].best_s) + sum(samples[1].best_s) == host_s


def test_the_host_runs_ahead_of_the_device(device: Make) -> None:
    fake = device()
    seen: list[tuple[float, float]] = []
    run_back_to_back(
        [fake.phase("step", [(1, 10)] * 4)],
        fake,
        4,
        fake.on_step,
        before_drain=lambda: seen.append((fake.host_s, fake.free_from_s)),
    )
    assert seen == [(1004.0, 1041.0)]


def test_back_to_back_samples_are_what_the_device_took(device: Make) -> None:
    fake = device()
    forward, backward = [(1, 8), (1, 4), (1, 2)], [(1, 16), (1, 32), (1, 64)]
    samples, host_s = run_back_to_back(
        [fake.phase("forward", forward), fake.phase("backward", backward)], fake, 3, fake.on_step
    )
    # The first mark is reached at once; the device waits for the first launch, a second, and never again.
    assert samples == (
        PhaseSamples(phase="forward", device_s=(9.0, 4.0, 2.0), lead_s=(8.0, 26.0, 58.0)),
        PhaseSamples(phase="backward", device_s=(16.0, 32.0, 64.0), lead_s=(23.0, 57.0, 121.0)),
        PhaseSamples(phase="step", device_s=(25.0, 36.0, 66.0), lead_s=(8.0, 26.0, 58.0)),
    )
    assert host_s == 25.0 + 36.0 + 66.0


def test_a_phase_that_runs_several_times_in_a_step_counts_once_with_the_sum(device: Make) -> None:
    fake = device()
    forward, backward = [(1, 8), (1, 4), (1, 2), (1, 1)], [(1, 16), (1, 32), (1, 64), (1, 128)]
    phases = [fake.phase("forward", forward), fake.phase("backward", backward)] * 2
    samples, host_s = run_back_to_back(phases, fake, 2, fake.on_step)
    # The first launch is waited for, a second; when it is over the host has started all of a step by its fourth second.
    assert samples == (
        PhaseSamples(phase="forward", device_s=(1.0 + 8 + 4, 2.0 + 1), lead_s=(8.0, 58.0)),
        PhaseSamples(phase="backward", device_s=(16.0 + 32, 64.0 + 128), lead_s=(23.0, 121.0)),
        PhaseSamples(phase="step", device_s=(61.0, 195.0), lead_s=(8.0, 58.0)),
    )
    assert host_s == 61.0 + 195.0


def test_a_device_that_waits_for_launches_is_timed_with_the_waiting(device: Make) -> None:
    fake = device()
    samples, host_s = run_back_to_back([fake.phase("step", [(7, 2)] * 3)], fake, 3, fake.on_step)
    assert samples == (PhaseSamples(phase="step", device_s=(9.0, 7.0, 7.0), lead_s=(2.0, 2.0, 2.0)),)
    assert host_s == 3 * 7 + 2


def test_where_the_host_is_the_device_its_clock_gives_the_samples(device: Make) -> None:
    fake = device(asynchronous=False)
    phases = [fake.phase("forward", [(1, 2), (1, 4)]), fake.phase("backward", [(0, 8), (0, 16)])]
    samples, host_s = run_back_to_back(phases, fake, 2, fake.on_step)
    assert samples == (
        PhaseSamples(phase="forward", host_s=(3.0, 5.0)),
        PhaseSamples(phase="backward", host_s=(8.0, 16.0)),
        PhaseSamples(phase="step", host_s=(11.0, 21.0)),
    )
    assert host_s == 11.0 + 21.0


def test_a_whole_step_that_is_one_phase_is_reported_once(device: Make) -> None:
    fake = device()
    samples, _ = run_back_to_back([fake.phase("step", [(0, 3), (0, 5)])], fake, 2, fake.on_step)
    assert samples == (PhaseSamples(phase="step", device_s=(3.0, 5.0), lead_s=(3.0, 8.0)),)


def test_a_step_of_one_phase_is_that_phase_and_a_step(device: Make) -> None:
    for asynchronous in (True, False):
        fake = device(asynchronous=asynchronous)
        samples, _ = run_back_to_back([fake.phase("forward", [(0, 3), (0, 5)])], fake, 2, fake.on_step)
        assert [(column.phase, column.best_s) for column in samples] == [("forward", (3, 5)), ("step", (3, 5))]


def test_no_iterations_give_no_samples_and_still_reach_the_drain(device: Make) -> None:
    fake = device()
    samples, host_s = run_back_to_back(
        [fake.phase("forward", [])], fake, 0, fake.on_step, before_drain=lambda: fake.events.append("drain")
    )
    assert fake.events == ["reserve marks", "synchronize", "mark", "drain", "synchronize"]
    assert all(sample.best_s == () for sample in samples)
    assert host_s == 0


def test_work_that_was_under_way_before_is_not_counted(device: Make) -> None:
    fake = device()
    fake.free_from_s = 2000.0
    samples, host_s = run_back_to_back([fake.phase("step", [(0, 3)])], fake, 1, fake.on_step)
    assert samples[0].best_s == (3.0,)
    assert host_s == 3.0


# --- synchronised -----------------------------------------------------------------------------------------


def test_synchronised_phases_begin_and_end_with_the_device_idle(device: Make) -> None:
    fake = device()
    phases = [fake.phase("forward", [(1, 5)] * 2), fake.phase("backward", [(1, 5)] * 2)]
    run_synchronised(phases, fake, 2, fake.on_step)

    def alone(phase: str) -> list[str]:
        return ["synchronize", "reset peak", "mark", phase, "mark", "synchronize", f"peak of {phase}"]

    step = [*alone("forward"), *alone("backward")]
    assert fake.events == [*step, "step 0 given", *step, "step 1 given"]


def test_synchronised_samples_hold_both_clocks(device: Make) -> None:
    fake = device()
    phases = [fake.phase("forward", [(1, 8), (2, 4)]), fake.phase("backward", [(3, 16), (5, 32)])]
    samples, peaks = run_synchronised(phases, fake, 2, fake.on_step)
    # Alone, a phase takes its launch and its work, by either clock: the first mark lies before the launch.
    assert samples == (
        PhaseSamples(phase="forward", device_s=(9.0, 6.0), host_s=(9.0, 6.0)),
        PhaseSamples(phase="backward", device_s=(19.0, 37.0), host_s=(19.0, 37.0)),
    )
    assert peaks == ()


def test_the_hosts_clock_also_counts_what_the_device_does_not_see(device: Make) -> None:
    fake = device()

    def run() -> None:
        fake.free_from_s = fake.host_s + 2
        fake.host_s += 7

    samples, _ = run_synchronised([Phase(name="step", run=run)], fake, 1, fake.on_step)
    assert samples[0].host_s == (7.0,)


def test_a_phases_peak_is_the_largest_of_all_iterations(device: Make) -> None:
    fake = device(peaks=[(10, 100), (7, 200), (30, 90), (5, 80), (20, 120), (6, 70)])
    phases = [fake.phase("forward", [(0, 1)] * 3), fake.phase("backward", [(0, 1)] * 3)]
    _, peaks = run_synchronised(phases, fake, 3, fake.on_step)
    assert peaks == (
        PeakMemory(phase="forward", peak_allocated_bytes=30, peak_reserved_bytes=120),
        PeakMemory(phase="backward", peak_allocated_bytes=7, peak_reserved_bytes=200),
    )


def test_an_exception_in_a_phase_passes_through(device: Make) -> None:
    fake = device()

    def run() -> None:
        raise ZeroDivisionError

    for loop in (run_back_to_back, run_synchronised):
        with pytest.raises(ZeroDivisionError):
            loop([Phase(name="step", run=run)], fake, 1, fake.on_step)
