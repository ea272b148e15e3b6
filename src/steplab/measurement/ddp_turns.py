"""Contenders that take turns: a few steps of one, then of the next, until each has its steps.

Before each step Python gets a head start on all ranks (head_start.py): what is asked here is what communication costs
the devices, and a host that is slow, or slowed by others, would be all that the difference of two steps shows. No
contender has anything under way between two steps, so that nothing passes unseen meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from steplab.measurement.head_start import HeadStart
from steplab.measurement.loop import Phase, run_back_to_back
from steplab.measurement.world import World
from steplab.records.timing import PhaseSamples

Samples = tuple[PhaseSamples, ...]


def run_turns(
    contenders: Sequence[Sequence[Phase]], world: World, steps: int, turn: int, on_step: Callable[[int], None]
) -> list[Samples]:
    """At least `steps` samples of each contender, `turn` in a row; every rank calls it.

    Rounds begin with another contender each, so that none always comes after the same one.
    """
    head_start = HeadStart(world.device, world.collectives)
    found: list[list[Samples]] = [[] for _ in contenders]
    done = 0
    while done < steps:
        order = list(range(len(contenders)))
        if (done // turn) % 2:
            order.reverse()
        for number in order:
            found[number] += _turn(contenders[number], world, head_start, turn)
        done += turn
        on_step(min(done, steps) - 1)
    return [joined(turns) for turns in found]


def _turn(phases: Sequence[Phase], world: World, head_start: HeadStart, steps: int) -> list[Samples]:
    """So many steps, after one with the ranks together that is not counted: it says how long Python takes for one."""
    world.device.synchronize()
    world.collectives.host_gather(None)
    started = time.perf_counter()
    for phase in phases:
        phase.run()
    give = partial(head_start.give, time.perf_counter() - started)
    turns = [run_back_to_back(phases, world.device, 1, lambda iteration: None, head_start=give) for _ in range(steps)]
    return [samples for samples, _ in turns]


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
