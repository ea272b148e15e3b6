"""Raw timings of a step. Records hold every sample; statistics are computed where they are shown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from steplab.records.problems import Problem, as_long

HARDLY_AHEAD = 0.01
"""Smallest share of the step by which the host must be ahead of the device; with a shorter lead, the device waits
whenever one call of Python takes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSamples:
    """Times of one phase, one sample per iteration, in the order they were taken."""

    phase: str
    """The phase: step for the whole step, or forward, backward, optimizer, or a name that the user gave."""
    device_s: tuple[float, ...] | None = None
    """Seconds between events on the device's stream; None for a device without events."""
    host_s: tuple[float, ...] | None = None
    """Seconds on the host's clock with the device synchronised at both ends; None if that was not measured."""
    lead_s: tuple[float, ...] | None = None
    """Host lead in seconds: the time from when the host had started all of the phase until the device had finished it.
    Near zero, the device waited for the host. For a step, the smallest lead of its phases. None if the device is the
    host, or the host waited for the device."""

    @property
    def best_s(self) -> tuple[float, ...]:
        """The samples between device events if there are any, otherwise those of the host's clock."""
        return self.device_s or self.host_s or ()

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        clocks = {name: getattr(self, name) for name in ("device_s", "host_s", "lead_s")}
        given = {name: samples for name, samples in clocks.items() if samples is not None}
        for name, samples in given.items():
            yield from as_long(f".{name}", samples, len(self.best_s), ".device_s" if self.device_s else ".host_s")
        if self.phase == "step" and not all(self.best_s):
            yield ".device_s" if self.device_s else ".host_s", "has a step that took no time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The raw timings of one step, each a list of phases."""

    warmup: tuple[PhaseSamples, ...]
    """Times of the warm-up steps, which ran back to back like the measured ones."""
    back_to_back: tuple[PhaseSamples, ...]
    """Times of the measured steps without a synchronisation between them, as in training: the headline."""
    synchronised: tuple[PhaseSamples, ...] = ()
    """Times of further steps with a synchronisation before and after every phase, by both clocks. Empty if the device
    is the host."""
    back_to_back_host_s: float | None = None
    """Seconds of the whole back-to-back loop on the host's clock, synchronised at both ends, to check the sum of the
    events."""
    between_s: tuple[float, ...] | None = None
    """In a user's own loop, seconds from the end of a measured step to the beginning of the next, on the same timeline:
    data loading, logging, evaluation. None: steps begin where the previous one ends, or there were fewer than two."""
    first_step_s: float | None = None
    """Synchronised host time in seconds of the step that compiled, before the warm-up, or of the steps before a
    recording as CUDA graphs and the recording; None for an eager step."""
    one_thread_s: tuple[float, ...] = ()
    """Seconds of further steps on a CPU with one thread in place of all; empty where a first such step was no faster,
    or none was tried."""

    def phase(self, name: str) -> PhaseSamples | None:
        """The back-to-back samples of one phase."""
        return find_phase(self.back_to_back, name)


def lead_s(phases: Sequence[PhaseSamples], name: str = "step") -> float | None:
    """Median host lead at the end of a phase, or, for the step, the least of its phases; None where it is not known."""
    samples = find_phase(phases, name)
    return median(samples.lead_s) if samples and samples.lead_s else None


def waits_for_host(phases: Sequence[PhaseSamples], name: str = "step") -> bool:
    """Whether the host lead was near zero at the end of a phase, or, for the step, of some phase, so that the device
    waits for the host at times."""
    lead, step = lead_s(phases, name), find_phase(phases, "step")
    return lead is not None and step is not None and lead < HARDLY_AHEAD * median(step.best_s)


def find_phase(phases: Sequence[PhaseSamples], name: str) -> PhaseSamples | None:
    """The phase of that name; None if it was not measured."""
    return next((phase for phase in phases if phase.phase == name), None)


def curve(timing: Timing, name: str = "step") -> tuple[float, ...]:
    """Times of the step, or of a phase of it, from the first step on: the warm-up steps, then the measured ones."""
    warmup, measured = find_phase(timing.warmup, name), timing.phase(name)
    return (warmup.best_s if warmup else ()) + (measured.best_s if measured else ())


def joined(turns: Sequence[Sequence[PhaseSamples]]) -> tuple[PhaseSamples, ...]:
    """The samples of several turns of one step, phase by phase; a clock that one turn lacks is left out."""

    def of_phase(parts: Sequence[PhaseSamples]) -> PhaseSamples:
        def column(name: str) -> tuple[float, ...] | None:
            columns = [getattr(samples, name) for samples in parts]
            return None if any(c is None for c in columns) else tuple(second for c in columns for second in c)

        return PhaseSamples(
            phase=parts[0].phase, device_s=column("device_s"), host_s=column("host_s"), lead_s=column("lead_s")
        )

    return tuple(of_phase(parts) for parts in zip(*turns, strict=True))


def part(phases: Sequence[PhaseSamples], first: int, end: int | None = None) -> tuple[PhaseSamples, ...]:
    """The samples of the steps from number `first` up to and without number `end`, of every phase."""

    def cut(column: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if column is None else column[first:end]

    return tuple(
        PhaseSamples(phase=p.phase, device_s=cut(p.device_s), host_s=cut(p.host_s), lead_s=cut(p.lead_s))
        for p in phases
    )


def phases_problems(
    path: str, phases: Sequence[PhaseSamples], *, in_each_step: bool = True, may_be_empty: bool = False
) -> Iterator[Problem]:
    """Problems of the phases of the same steps. In a user's own loop a phase need not occur in each step."""
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
