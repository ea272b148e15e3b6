"""The overhead per step of steplab's loop against a bare loop.

    python -m benchmarks.overhead [model] [context] [steps]

The bare loop runs the same phases n times, synchronises and divides, as written by hand. Both sides alternate in one
process, so clock drift affects both; the result is the median ratio of neighbours. Two turns without steplab give the
noise.
"""

import sys
import time
from statistics import median

from steplab.measurement.clock import run_back_to_back
from steplab.measurement.machine.device import open_device
from steplab.measurement.step.step import make_step
from steplab.model.build import build_workload
from steplab.specs.resolve import resolve_step

ROUNDS = 15


def loop(model: str = "tiny", context: str = "128", steps: str = "20") -> None:
    num_steps = int(steps)
    spec = resolve_step({"model": model, "context": context, "precision": "fp32"})
    device = open_device("auto")
    phases = make_step(build_workload(spec, device.torch_device), spec, device.torch_device).phases

    def bare() -> float:
        device.synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            for phase in phases:
                phase.run()
        device.synchronize()
        return (time.perf_counter() - started) / num_steps

    def ours() -> float:
        # The tool's report: host time over its loop, with all marks and callbacks.
        return run_back_to_back(phases, device, num_steps, lambda iteration: None)[1] / num_steps

    bare(), ours()
    print(f"device {device.torch_device}, {model}, context {context}, {ROUNDS} rounds of {num_steps} steps")
    turns = [(bare(), ours(), bare()) for _ in range(ROUNDS)]
    ratio = median(2 * mine / (before + after) for before, mine, after in turns)
    noise = median(abs(after / before - 1) for before, _, after in turns)
    bare_s = median(before for before, _, _ in turns)
    print(f"bare loop {bare_s * 1e3:.3f} ms a step; with steplab x {ratio:.4f}; two bare loops differ by {noise:.4f}")


if __name__ == "__main__":
    loop(*sys.argv[1:])
