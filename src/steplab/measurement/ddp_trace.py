"""Some steps of a contender under torch.profiler, on all ranks at once: none waits for one that is slowed alone."""

from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from steplab.measurement.ddp_contender import ContenderStep
from steplab.measurement.device import Device


def trace_steps(step: ContenderStep, device: Device, num_steps: int, target: Path | None) -> None:
    """Record `num_steps` steps, and one before them under another name; write them to `target`, None on other ranks."""
    activities = [ProfilerActivity.CPU]
    if device.torch_device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    device.synchronize()
    with profile(activities=activities) as profiler:
        for name in ("warmup step", *("step" for _ in range(num_steps))):
            with record_function(name):
                for phase in step.phases:
                    with record_function(phase.name):
                        phase.run()
        device.synchronize()
    if target is not None:
        profiler.export_chrome_trace(str(target))
