"""Python's part of an eager step of any model: the operators it calls, and how long the device waits for them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from steplab.costs.rates import Gpu, HostRates
from steplab.plan.dry_run.events import MADE_BY_HOST, READS_A_VALUE, Operator
from steplab.plan.fusion import Kernel
from steplab.plan.kernel_time import kernel_in_step_s
from steplab.specs.step import StepSpec


@dataclass(frozen=True, slots=True)
class Host:
    host_s: float
    idle_s: float


def hosts_of(spec: StepSpec, gpu: Gpu, operators: Sequence[Operator] | None) -> tuple[dict[str, Host], ...]:
    """One dict by phase for a quick CPU and one for the measured CPU; empty if the CPU's time per call is not known.
    Where the model reads a value off a tensor, Python waits for the device and is no longer ahead of it. transformers
    does so to detect packed sequences."""
    rates = gpu.rates.host
    if operators is None or spec.compile != "off" or not rates.forward_call_s:
        return ()
    launches = launches_of(operators, gpu)
    return tuple(waiting(launches, rates, factor) for factor in (rates.eager_s / rates.eager_slow_s, 1.0))


@dataclass(frozen=True, slots=True)
class Launch:
    phase: str
    calls: int
    device_s: float
    is_awaited: bool
    """True if Python reads its result."""


def launches_of(operators: Sequence[Operator], gpu: Gpu) -> list[Launch]:
    known, found = dict[object, float](), list[Launch]()
    for op in operators:
        if op.name == MADE_BY_HOST:
            continue
        sizes = (op.name, op.rate, op.dtype, op.product, op.flops, op.moved_bytes, op.kind)
        if sizes not in known:
            known[sizes] = kernel_in_step_s(Kernel(op, op.moved_bytes), gpu)
        found.append(Launch(op.phase, op.calls, known[sizes], op.name == READS_A_VALUE))
    return found


def waiting(launches: Sequence[Launch], rates: HostRates, factor: float = 1.0) -> dict[str, Host]:
    """Python's time by phase, on a CPU that takes `factor` of the measured one's, and the device's waiting."""
    device = host = 0.0
    host_s, idle_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for step in (1, 2):  # the second begins as far ahead as the first ends
        for launch in launches:
            call_s = rates.forward_call_s if launch.phase == "forward" else rates.backward_call_s
            host += factor * launch.calls * call_s
            if step == 2:
                host_s[launch.phase] += factor * launch.calls * call_s
                idle_s[launch.phase] += max(0.0, host - device)
            device = max(device, host) + launch.device_s
            if launch.is_awaited:
                host = device
    return {phase: Host(host_s[phase], idle_s[phase]) for phase in host_s}
