"""Contenders that take turns: a few steps of one back to back, then of the next, until each has its steps."""

from collections.abc import Callable, Sequence

from steplab.measurement.loop import Phase, run_back_to_back
from steplab.measurement.world import World
from steplab.records.timing import PhaseSamples

Samples = tuple[PhaseSamples, ...]

_UNCOUNTED = 3
"""Steps at the start of a turn: in training the host runs ahead of the device, and here it has to get there first."""


def run_turns(
    contenders: Sequence[Sequence[Phase]], world: World, steps: int, turn: int, on_step: Callable[[int], None]
) -> list[Samples]:
    """At least `steps` samples of each contender, `turn` in a row; every rank calls it.

    Each turn begins with the ranks together and steps that are not counted: the device's queue is empty then, and ranks
    wait for one another. Rounds begin with another contender each, so that none always comes after the same one.
    """
    found: list[list[Samples]] = [[] for _ in contenders]
    done = 0
    while done < steps:
        order = list(range(len(contenders)))
        if (done // turn) % 2:
            order.reverse()
        for number in order:
            world.device.synchronize()
            world.collectives.host_gather(None)
            samples, _ = run_back_to_back(contenders[number], world.device, turn + _UNCOUNTED, lambda iteration: None)
            found[number].append(tuple(map(_counted, samples)))
        done += turn
        on_step(min(done, steps) - 1)
    return [joined(turns) for turns in found]


def _counted(samples: PhaseSamples) -> PhaseSamples:
    return PhaseSamples(
        phase=samples.phase,
        device_s=samples.device_s[_UNCOUNTED:] if samples.device_s is not None else None,
        host_s=samples.host_s[_UNCOUNTED:] if samples.host_s is not None else None,
        lead_s=samples.lead_s[_UNCOUNTED:] if samples.lead_s is not None else None,
    )


def joined(turns: Sequence[Samples]) -> Samples:
    """The samples of several turns of one contender, phase by phase."""
    return tuple(_one_after_another(phase) for phase in zip(*turns, strict=True))


def _one_after_another(turns: Samples) -> PhaseSamples:
    def column(name: str) -> tuple[float, ...] | None:
        parts = [getattr(samples, name) for samples in turns]
        return None if any(part is None for part in parts) else tuple(second for part in parts for second in part)

    return PhaseSamples(
        phase=turns[0].phase, device_s=column("device_s"), host_s=column("host_s"), lead_s=column("lead_s")
    )
