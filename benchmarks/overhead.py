"""What steplab's loop adds to a bare loop over the same step: ours over bare, in one process, alternating.

    python -m benchmarks.overhead [model] [context] [steps]

The bare loop is what one would write by hand: run the phases n times, synchronise, divide. Both loops run the
very same phases; they alternate, so that a drifting clock touches both alike, and the median of the ratios of
neighbours is the result. Two bare loops against each other give the noise.
"""

import sys
import time
from statistics import median

from steplab.measurement.machine.device import open_device
from steplab.measurement.step.loop import run_back_to_back
from steplab.measurement.step.step import make_step
from steplab.model.build import build_workload
from steplab.specs.resolve import resolve_step

ROUNDS = 15


def main(model: str = "tiny", context: str = "128", steps: str = "20") -> None:
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
        # What the tool reports: the host's time over its loop, every mark and callback included.
        return run_back_to_back(phases, device, num_steps, lambda iteration: None)[1] / num_steps

    bare(), ours()
    rounds = [(bare(), ours(), bare()) for _ in range(ROUNDS)]
    ratio = median(2 * mine / (before + after) for before, mine, after in rounds)
    noise = median(abs(after / before - 1) for before, _, after in rounds)
    bare_s = median(before for before, _, _ in rounds)
    print(f"device {device.torch_device}, {model}, context {context}, {ROUNDS} rounds of {num_steps} steps")
    print(f"bare loop {bare_s * 1e3:.3f} ms a step; with steplab x {ratio:.4f}; bare against bare +-{noise:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
