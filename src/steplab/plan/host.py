"""Takes a CPU's pace, Python's time per kernel, from a measured step where the GPU waited for Python.

It predicts other steps on that machine best: CPUs differ by a factor of two and more, and shared ones are slower still.
"""

from statistics import median

import msgspec

from steplab.costs.rates import Gpu, HostRates, with_rates
from steplab.plan.time import predict_step_time
from steplab.records.run import Run
from steplab.records.timing import find_phase, waits_for_host
from steplab.specs.layout import SINGLE
from steplab.specs.step import StepSpec

_LAUNCHED_BY_THE_MODEL = ("forward", "backward")


def on_the_host_of(run: Run, gpu: Gpu) -> Gpu:
    """The GPU's rates with the CPU's pace in a measured step; unchanged if the GPU never waited for Python.

    The pace is measured seconds over predicted kernels, the median over phases where the GPU waited. Launchers with
    more Python per kernel, such as torch.compile, are scaled alike. Steps of several processes are ignored, because
    their phases include waits for each other. Raises Unsupported for an unpredictable step.
    """
    if run.spec is None or run.timing is None or run.spec.replays_model or run.spec.layout != SINGLE:
        return gpu
    phases = run.timing.back_to_back
    parts = predict_step_time(run.spec, gpu).parts
    paces = []
    for name in _LAUNCHED_BY_THE_MODEL:
        samples = find_phase(phases, name)
        kernels = sum(part.kernels for part in parts if part.phase == name)
        if samples and kernels and waits_for_host(phases, name):
            paces.append(median(samples.best_s) / kernels)
    if not paces:
        return gpu
    host, order = gpu.rates.host, ("eager", "compiled", "triton")
    factor = median(paces) / host.paces(run.spec.launcher)[0]
    scaled = {name: factor * host.paces(name)[0] for name in order[order.index(run.spec.launcher) :]}
    both = {f"{name}{which}_s": pace for name, pace in scaled.items() for which in ("", "_slow")}
    return with_rates(gpu, host=msgspec.structs.replace(host, **both))


def compile_s(spec: StepSpec, host: HostRates) -> float:
    """Seconds that torch.compile takes with an empty cache, for one block or the whole model.

    It is 0 for an eager step, or if the number of blocks is unknown.
    """
    shape = spec.model.shape
    if spec.compile == "off" or shape is None:
        return 0.0
    return host.compile_blocks_s if spec.compile == "block" else host.compile_layer_s * shape.num_layers
