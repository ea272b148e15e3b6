"""Variants take turns: a few steps of one, then of the next, until each has its steps.

Before each step Python gets a head start on all ranks (machine.head_start): the question is what communication costs
the devices, and a slow host would otherwise dominate the difference of two steps. No variant has work under way between
two steps, so that nothing passes unseen.
"""

import time
from collections.abc import Callable, Sequence

from steplab.measurement.machine.head_start import HeadStart
from steplab.measurement.machine.world import World
from steplab.measurement.step.loop import Phase, run_ahead
from steplab.records.timing import HARDLY_AHEAD, PhaseSamples, find_phase, joined

Samples = tuple[PhaseSamples, ...]

LONGEST_HOLD_S = 0.5
"""The longest hold; Python fills the launch queue in less."""


def run_turns(
    variants: Sequence[Sequence[Phase]], world: World, steps: int, turn: int, on_step: Callable[[int], None]
) -> list[tuple[Samples, float | None]]:
    """At least `steps` samples of each variant, `turn` in a row, and the longest hold before a step; every rank calls
    this.

    Each round begins with another variant, so that none always follows the same one.
    """
    head_starts = [HeadStart(world.device, world.collectives, LONGEST_HOLD_S) for _ in variants]
    found: list[list[Samples]] = [[] for _ in variants]
    done = 0
    while done < steps:
        order = list(range(len(variants)))
        if (done // turn) % 2:
            order.reverse()
        for number in order:
            found[number] += _turn(variants[number], world, head_starts[number], turn)
        done += turn
        on_step(min(done, steps) - 1)
    held = [head_start.seconds if world.device.asynchronous else None for head_start in head_starts]
    return [(joined(turns), held_s) for turns, held_s in zip(found, held, strict=True)]


def _turn(phases: Sequence[Phase], world: World, head_start: HeadStart, steps: int) -> list[Samples]:
    """Run `steps` steps, after one that is not counted and shows how long Python takes to launch one.

    A step in which Python was not ahead on some rank is made again with a longer hold, if that is possible.
    """
    found: list[Samples] = []
    world.device.synchronize()
    world.collectives.host_gather(None)
    started = time.perf_counter()
    for phase in phases:
        phase.run()
    head_start.lengthen(time.perf_counter() - started)
    while len(found) < steps:
        samples, started_s = run_ahead(phases, world.device, 1, head_start)
        if not any(world.collectives.host_gather(_hardly_ahead(samples))) or not head_start.lengthen(started_s):
            found.append(samples)
    return found


def _hardly_ahead(samples: Samples) -> bool:
    step = find_phase(samples, "step")
    assert step is not None
    return step.lead_s is not None and min(step.lead_s) < HARDLY_AHEAD * min(step.best_s)
