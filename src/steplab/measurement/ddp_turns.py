"""Contenders that take turns: a few steps of one back to back, then of the next, until each has its steps."""

from collections.abc import Callable, Sequence

from steplab.measurement.loop import Phase, run_back_to_back
from steplab.measurement.world import World
from steplab.records.timing import PhaseSamples

Samples = tuple[PhaseSamples, ...]


def run_turns(
    contenders: Sequence[Sequence[Phase]], world: World, steps: int, turn: int, on_step: Callable[[int], None]
) -> list[Samples]:
    """At least `steps` samples of each contender, `turn` in a row; every rank calls it.

    Each turn begins with the ranks together and a step that is not counted: the device's queue is empty then, and ranks
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
            samples, _ = run_back_to_back(contenders[number], world.device, turn + 1, lambda iteration: None)
            found[number].append(tuple(_without_first(column) for column in samples))
        done += turn
        on_step(min(done, steps) - 1)
    return [joined(turns) for turns in found]


def _without_first(column: PhaseSamples) -> PhaseSamples:
    return PhaseSamples(
        phase=column.phase,
        device_s=column.device_s[1:] if column.device_s is not None else None,
        host_s=column.host_s[1:] if column.host_s is not None else None,
    )


def joined(turns: Sequence[Samples]) -> Samples:
    """The samples of several turns of one contender, phase by phase."""
    columns_of_all = []
    for index, first in enumerate(turns[0]):
        columns = [turn[index] for turn in turns]
        on_device = first.device_s is not None
        seconds = tuple(second for column in columns for second in column.best_s)
        columns_of_all.append(
            PhaseSamples(
                phase=first.phase, device_s=seconds if on_device else None, host_s=None if on_device else seconds
            )
        )
    return tuple(columns_of_all)
