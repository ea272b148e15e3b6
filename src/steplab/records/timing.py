"""Raw times of a step, sample by sample, and its place among alternating runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Annotated, Any

import msgspec

from steplab.records.record import Positive, Problem, as_long

HARDLY_AHEAD = 0.01
"""Host lead, as a share of the step, below which the device may wait for Python."""

_CLOCKS = ("device_s", "host_s", "lead_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSamples:
    """Samples of one phase's time, one per step, in order."""

    phase: str
    """step, forward, backward, optimizer, or a name from your own loop."""
    device_s: tuple[float, ...] | None = None
    host_s: tuple[float, ...] | None = None
    lead_s: tuple[float, ...] | None = None
    """Seconds from the end of the phase's launches on the host to its end on the device; near zero, the device waited.
    A step's is the smallest of its phases'. None: on a CPU, or the host waited for the device.
    """

    @property
    def best_s(self) -> tuple[float, ...]:
        """`device_s` if present, else `host_s`."""
        return self.device_s or self.host_s or ()

    @property
    def clocks(self) -> dict[str, tuple[float, ...]]:
        """Present samples by field name: device_s, host_s, lead_s."""
        columns = {name: getattr(self, name) for name in _CLOCKS}
        return {name: samples for name, samples in columns.items() if samples is not None}

    def problems(self) -> Iterator[Problem]:
        for name, samples in self.clocks.items():
            yield from as_long(f".{name}", samples, len(self.best_s), ".device_s" if self.device_s else ".host_s")
        if self.phase == "step" and not all(self.best_s):
            yield ".device_s" if self.device_s else ".host_s", "has a step that took no time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """Energy of one GPU during the back-to-back steps, and time at the power limit, by NVML."""

    joules: Annotated[float, msgspec.Meta(gt=0)]
    """Energy of the whole board during `seconds`."""
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    num_steps: Positive
    limited_s: float | None = None
    """Seconds while the power limit lowered the clock; None: not reported."""

    @property
    def per_step_j(self) -> float:
        return self.joules / self.num_steps

    @property
    def mean_power_w(self) -> float:
        return self.joules / self.seconds

    @property
    def limited_share(self) -> float | None:
        return None if self.limited_s is None else self.limited_s / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Raw times of one step, as lists of phases."""

    warmup: tuple[PhaseSamples, ...]
    back_to_back: tuple[PhaseSamples, ...]
    """Measured steps without synchronisation between them, as in training; all results use these."""
    synchronised: tuple[PhaseSamples, ...] = ()
    """Further steps with synchronised phases, timed on host and device; empty on a CPU."""
    back_to_back_host_s: float | None = None
    """Host seconds of all back-to-back steps, synchronised at both ends, to check the events' sum."""
    between_s: tuple[float, ...] | None = None
    """Seconds between measured steps of your own loop: data loading, logging, evaluation. None: no gaps, or fewer than
    two steps.
    """
    first_step_s: float | None = None
    """Synchronised host seconds of the step that compiled, or of capturing CUDA graphs with the steps before. None:
    eager.
    """
    one_thread_s: tuple[float, ...] = ()
    """Seconds of CPU steps with one thread; empty: none, or the first was not faster."""
    energy: Energy | None = None
    """Energy of rank 0's GPU during the back-to-back steps. None: not reported, or they took less than a second."""

    def phase(self, name: str) -> PhaseSamples | None:
        return find_phase(self.back_to_back, name)


def lead_s(phases: Sequence[PhaseSamples], name: str = "step") -> float | None:
    """Median host lead of a phase in seconds (PhaseSamples.lead_s); None: unknown."""
    samples = find_phase(phases, name)
    return median(samples.lead_s) if samples and samples.lead_s else None


def waits_for_host(phases: Sequence[PhaseSamples], name: str = "step") -> bool:
    """True if the median host lead of the phase is below HARDLY_AHEAD of a step."""
    lead, step = lead_s(phases, name), find_phase(phases, "step")
    return lead is not None and step is not None and lead < HARDLY_AHEAD * median(step.best_s)


def find_phase(phases: Sequence[PhaseSamples], name: str) -> PhaseSamples | None:
    return next((phase for phase in phases if phase.phase == name), None)


def curve(timing: Timing, name: str = "step") -> tuple[float, ...]:
    """Times of the step or a phase: warm-up, then measured steps."""
    warmup, measured = find_phase(timing.warmup, name), timing.phase(name)
    return (warmup.best_s if warmup else ()) + (measured.best_s if measured else ())


def joined(turns: Sequence[Sequence[PhaseSamples]]) -> tuple[PhaseSamples, ...]:
    """Concatenate the samples of several turns, per phase; drops clocks that a turn lacks."""

    def of_phase(parts: Sequence[PhaseSamples]) -> PhaseSamples:
        columns = {name: [getattr(samples, name) for samples in parts] for name in _CLOCKS}
        whole: dict[str, Any] = {n: None if None in each else tuple(chain(*each)) for n, each in columns.items()}
        return replace(parts[0], **whole)

    return tuple(of_phase(parts) for parts in zip(*turns, strict=True))


def part(phases: Sequence[PhaseSamples], first: int) -> tuple[PhaseSamples, ...]:
    def cut(phase: PhaseSamples) -> PhaseSamples:
        later: dict[str, Any] = {name: samples[first:] for name, samples in phase.clocks.items()}
        return replace(phase, **later)

    return tuple(map(cut, phases))


def phases_problems(
    path: str, phases: Sequence[PhaseSamples], *, in_each_step: bool = True, may_be_empty: bool = False
) -> Iterator[Problem]:
    """Yield faults in phases measured together. Steps of a user's loop may skip phases."""
    if len({phase.phase for phase in phases}) < len(phases):
        yield path, "has the same phase twice"
    steps = find_phase(tuple(phases), "step") or next(iter(phases), None)
    for index, phase in enumerate(phases):
        count, most = len(phase.best_s), len(steps.best_s) if steps else 0
        if not count and not may_be_empty:
            yield f"{path}[{index}]", "has no samples"
        if count > most or (in_each_step and count < most):
            yield f"{path}[{index}]", f"has {count} samples of {phase.phase[:64]}, where others have {most}"


def timing_problems(timing: Timing, *, in_each_step: bool) -> Iterator[Problem]:
    yield from phases_problems(".timing.warmup", timing.warmup, in_each_step=in_each_step, may_be_empty=True)
    yield from phases_problems(".timing.synchronised", timing.synchronised, in_each_step=in_each_step)
    yield from measured_problems(".timing.back_to_back", timing.back_to_back, in_each_step=in_each_step)


def measured_problems(path: str, phases: Sequence[PhaseSamples], *, in_each_step: bool = True) -> Iterator[Problem]:
    yield from phases_problems(path, phases, in_each_step=in_each_step)
    if phases and not find_phase(tuple(phases), "step"):
        yield path, "lacks the phase step"


MOST_IN_A_BLOCK = 3
"""Most samples per block; comparisons resample blocks, because steps of a turn share its disturbances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Consecutive steps of one run, between those of the runs it alternates with."""

    place: int
    steps: int
    """Measured steps; they follow those of earlier turns in `timing.back_to_back`."""
    lead_in_s: tuple[float, ...] = ()
    """Seconds of the uncounted steps that begin the turn, while caches and clocks settle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    session: str
    """Id common to the runs that alternate."""
    label: str
    turns: tuple[Turn, ...] = ()
    alternating: str | None = None
    """Why each turn had its own process; None: one process waited between turns."""

    @property
    def num_steps(self) -> int:
        return sum(turn.steps for turn in self.turns)

    def blocks_of(self, samples: tuple[float, ...]) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Split samples into blocks of at most MOST_IN_A_BLOCK within one turn, each with that turn's `place`."""
        blocks, first = [], 0
        for turn in self.turns:
            end = first + turn.steps
            blocks += [
                (turn.place, samples[start : min(start + MOST_IN_A_BLOCK, end)])
                for start in range(first, end, MOST_IN_A_BLOCK)
            ]
            first = end
        return tuple(blocks)

    def problems(self) -> Iterator[Problem]:
        places = [turn.place for turn in self.turns]
        if places != sorted(set(places)):
            yield ".turns", "are not in the order of their places"
