"""Raw timings of a step. Records hold every sample; figures are computed from them where they are shown."""

from dataclasses import dataclass

HARDLY_AHEAD = 0.01
"""Of a step: a lead of the host's shorter than this share of it is none, as the device waits whenever Python takes
longer once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSamples:
    """Times of one phase, a sample an iteration, in the order they were taken."""

    phase: str
    """step (all of it), or one of its parts: forward, backward, optimizer, or a name the user gave."""
    device_s: tuple[float, ...] | None = None
    """Between events on the device's stream, in seconds; None where the device has no events of its own."""
    host_s: tuple[float, ...] | None = None
    """On the host's clock with the device synchronised at both ends, in seconds; None where that was not done."""
    lead_s: tuple[float, ...] | None = None
    """How far the host was ahead when it had started all of the phase: from then until the device was done with it, in
    seconds. Near zero, the device had nothing more to do. Of a step, the least of its phases; None where the host is
    the device, or waited for it."""

    @property
    def best_s(self) -> tuple[float, ...]:
        """The device's own samples where there are any, else the host's."""
        return self.device_s or self.host_s or ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The three ways one step was timed, each a list of phases."""

    warmup: tuple[PhaseSamples, ...]
    """The steps before the measured ones, timed in the same manner: the warm-up curve."""
    back_to_back: tuple[PhaseSamples, ...]
    """Measured steps run without a synchronisation between them, as training runs them: the headline."""
    synchronised: tuple[PhaseSamples, ...] = ()
    """Measured steps again, with a synchronisation before and after every phase: each phase on its own, by
    both clocks. Empty where the host is the device."""
    back_to_back_host_s: float | None = None
    """Host clock over the whole back-to-back loop, synchronised at both ends; a check on the events' sum."""
    first_step_s: float | None = None
    """Synchronised host time of the step that compiled, run before the warm-up; None for an eager step."""

    def phase(self, name: str) -> PhaseSamples | None:
        """The back-to-back samples of one phase."""
        return find_phase(self.back_to_back, name)


def find_phase(phases: tuple[PhaseSamples, ...], name: str) -> PhaseSamples | None:
    """The phase of that name, if it was measured."""
    return next((phase for phase in phases if phase.phase == name), None)


def curve(timing: Timing) -> tuple[float, ...]:
    """Whole-step times from the very first step on: the warm-up steps, then the measured ones."""
    warmup, measured = find_phase(timing.warmup, "step"), timing.phase("step")
    return (warmup.best_s if warmup else ()) + (measured.best_s if measured else ())
