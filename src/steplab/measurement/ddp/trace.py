"""Records some steps of a variant under torch.profiler, on all ranks at once, so that no rank waits for one that is
slowed alone.

A profiler slows Python most of all, so Python gets its head start here as well.
"""

import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from steplab.measurement.ddp.turns import LONGEST_HOLD_S
from steplab.measurement.ddp.variant import VariantStep
from steplab.measurement.machine.head_start import HeadStart
from steplab.measurement.machine.world import World


def trace_steps(step: VariantStep, world: World, num_steps: int, target: Path | None) -> None:
    """Record `num_steps` steps, and one before them under another name, into `target`; None on ranks that write no
    file."""
    activities = [ProfilerActivity.CPU]
    if world.device.torch_device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    head_start = HeadStart(world.device, world.collectives, LONGEST_HOLD_S)
    world.device.synchronize()
    with profile(activities=activities) as profiler:
        for name in ("warmup step", *("step" for _ in range(num_steps))):
            head_start.give()
            started = time.perf_counter()
            with record_function(name):
                for phase in step.cycle:
                    with record_function(phase.name):
                        phase.run()
            head_start.lengthen(time.perf_counter() - started)
            world.device.synchronize()
    if target is not None:
        profiler.export_chrome_trace(str(target))
