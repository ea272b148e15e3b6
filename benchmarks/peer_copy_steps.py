"""What peer copies add to a step of xl, by the size of their buckets and of the chunks these travel in, in turns.

    torchrun --nproc-per-node 2 -m benchmarks.peer_copy_steps [--buckets 100,200,400] [--parts 20,40,80] [--steps 12]

Forward and backward pass of each design, compiled by block, and the wait for its gradients, beside passes that send
nothing; parameters are not updated. A part is what a rank averages of a chunk, in MiB. Two designs more, of the first
sizes, show what the rest costs: one that makes no means, and one that only signals. As in `steplab ddp`, Python gets a
head start before each step. Milliseconds of the slowest rank, medians. Designs have memory of their own, some 9 GB
each. Some 90 seconds on two H200s.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

from steplab.measurement.ddp.turns import run_turns
from steplab.measurement.machine.head_start import lengthen_launch_queues
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.machine.world import join_world, meeting_place
from steplab.measurement.step.loop import Phase
from steplab.measurement.step.step import ModelStep
from steplab.model.build import build_workload
from steplab.parallel import DataParallel, sizes
from steplab.specs.resolve import resolve_step

MIB = 2**20
STEP = {"model": "xl", "context": 512, "batch": 4, "precision": "bf16", "compile": "block", "pass": "forward_backward"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """Peer copies of one kind, or none."""

    label: str
    """What is printed."""
    model: DataParallel | None = None
    """What averages the gradients; its averages may be wrong."""


def designs_of(step: ModelStep, buckets: Sequence[float], parts: Sequence[int]) -> list[Design]:
    """A collective call."""
    found = [Design(label="nothing")]
    for bucket_mb in buckets:
        for part in parts:
            with patch.object(sizes, "PART_BYTES", part * MIB):
                model = DataParallel(step.module, bucket_size_mb=bucket_mb, transport="peer_copy")
            found.append(Design(label=f"{bucket_mb:g} MB, parts of {part} MiB", model=model))
    for label, without in (("copies, no means", ["mean"]), ("signals alone", ["copy", "mean"])):
        with patch.object(sizes, "PART_BYTES", parts[0] * MIB):
            model = DataParallel(step.module, bucket_size_mb=buckets[0], transport="peer_copy")
        memory: Any = model._reducer._buckets[0]._copies.memory  # type: ignore[attr-defined]
        for name in without:
            setattr(memory, name, lambda *_: None)
        found.append(Design(label=label, model=model))
    return found


def phases_of(design: Design, step: ModelStep, everyone: Sequence[Design]) -> list[Phase]:
    """A step in which this design alone hears of gradients."""

    def forward() -> None:
        for other in everyone:
            if other.model is not None:
                other.model._reducer.active = other is design
        step.forward()

    def wait() -> None:
        if design.model is not None:
            design.model.finish_gradient_synchronization()
        step.module.zero_grad()

    runs: dict[str, Callable[[], None]] = {"forward": forward, "backward": step.backward, "gradient sync": wait}
    return [Phase(name=name, run=run) for name, run in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", default="100,200,400", help="sizes in MB of 1e6 bytes")
    parser.add_argument("--parts", default="20,40,80", help="sizes in MiB")
    parser.add_argument("--steps", type=int, default=12, help="samples of each design, at least")
    options = parser.parse_args()
    place = torchrun_around()
    if place is None:
        parser.error("start it by torchrun, with --nproc-per-node at least 2")
    lengthen_launch_queues()
    world = join_world(place, "auto", lambda: meeting_place(place))
    device, spec = world.device.torch_device, resolve_step(STEP)
    step = ModelStep(build_workload(spec, device), spec, device)
    step._keeps_gradients = True  # until they are averaged
    designs = designs_of(step, list(map(float, options.buckets.split(","))), list(map(int, options.parts.split(","))))
    variants = [phases_of(design, step, designs) for design in designs]
    for phases in variants:  # compiles the model, and the kernel of means
        for phase in phases:
            phase.run()
    found = run_turns(variants, world, options.steps, 3, lambda _: None)
    if world.rank == 0:
        print("design,forward_ms,backward_ms,wait_ms,added_ms,added_ms_least,added_ms_most", flush=True)
    beside = 0.0
    for design, (samples, _) in zip(designs, found, strict=True):
        everyone = world.collectives.host_gather({phase.phase: list(phase.best_s) for phase in samples})
        slowest = {name: [1e3 * max(each) for each in zip(*(rank[name] for rank in everyone), strict=True)]
                   for name in everyone[0]}  # fmt: skip
        times = [median(slowest[name]) for name in ("forward", "backward", "gradient sync")]
        beside = beside or median(slowest["step"])
        added = sorted(whole - beside for whole in slowest["step"])
        if world.rank == 0:
            row = [*times, median(added), added[0], added[-1]]
            print(f'"{design.label}",' + ",".join(f"{value:.2f}" for value in row), flush=True)
    world.leave()


if __name__ == "__main__":
    main()
