"""The run under diagnosis, and figures for all diagnoses; times are per step.

A profiler slows Python but hardly the device. Kernel times therefore come from the profile, step times from unprofiled
timing."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from steplab.costs.kernel_time import streaming_share
from steplab.costs.rates import Gpu, gpu_of, measured_gpu
from steplab.records.ceilings import Ceilings
from steplab.records.finding import Evidence
from steplab.records.profile import OpStats, PhaseTime, Profile
from steplab.records.run import Run
from steplab.specs.hardware import find_hardware
from steplab.specs.resolve import command
from steplab.specs.step import StepSpec
from steplab.units import format_rate

_COMPILED = re.compile(r"triton_(poi|red|per|tem)_|CompiledFunction|Torch-Compiled Region")
_TRIANGLE = re.compile(r"aten::tri[lu]_?$")
ACROSS = re.compile(r"HtoD|DtoH|Host|Pageable|Pinned")
WORTH_TELLING = 0.01
"""Least predicted saving, as a share of a step, for findings without their own threshold. Repeated measurements of one
step differ by about as much."""
_NO_PROFILE = Profile(source="", device="", num_steps=1, window_s=0.0, phases=(), kernels=(), ops=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    run: Run
    gpu: Gpu | None
    """Peaks and bandwidth of the device, stated or measured by `steplab doctor`; None: neither is known."""

    @property
    def spec(self) -> StepSpec | None:
        """Spec of the step; None if no spec determines it: a trace, a recorded loop, or a factory's own step."""
        spec = self.run.spec
        whole_step = spec is not None and spec.model.kind == "factory" and self.run.model is None
        return None if whole_step else spec

    @property
    def profile(self) -> Profile:
        """The run's profile; an empty one for a run without."""
        return self.run.profile or _NO_PROFILE

    @property
    def step_s(self) -> float | None:
        return self.run.median_s

    @property
    def slowdown(self) -> float:
        """Profiled over unprofiled step time on a CPU; 1 on other devices, which the profiler hardly slows."""
        if self.profile.device != "cpu" or not self.step_s:
            return 1.0
        return max(1.0, self.profile.window_s / self.profile.num_steps / self.step_s)

    def per_step(self, total_s: float) -> float:
        return total_s / self.profile.num_steps / self.slowdown

    @property
    def busy_s(self) -> float:
        return self.per_step(self.profile.busy_s)

    @property
    def length_s(self) -> float:
        """Seconds of a step: unprofiled if timed, else from the profile."""
        return self.step_s if self.step_s is not None else self.per_step(self.profile.window_s)

    def ops_s(self, ops: Iterable[OpStats]) -> float:
        return self.per_step(sum(op.device_s for op in ops))

    def profiled_wait_s(self, phases: Iterable[PhaseTime] | None = None) -> float:
        """Seconds per profiled step while the next kernel was not launched yet, by default of all phases."""
        phases = self.profile.phases if phases is None else phases
        return self.per_step(sum(phase.host_bound_s for phase in phases))

    @property
    def is_gpu(self) -> bool:
        if self.run.profile is not None:
            return self.profile.device == "cuda"
        return self.run.environment is not None and self.run.environment.device.kind == "cuda"

    @property
    def is_eager(self) -> bool:
        """True unless the record shows that the model was compiled; a user's model may compile itself."""
        if self.spec is not None and self.spec.compile != "off":
            return False
        return not any(_COMPILED.match(kernel.name) for kernel in self.profile.kernels)

    @property
    def is_causal(self) -> bool:
        """True if attention is known to be causal, from the model or from a triangular mask in the trace."""
        if self.spec is None:
            return any(_TRIANGLE.match(op.name) for op in self.profile.ops)
        model = self.run.model
        return self.spec.model.kind in ("transformer", "hf") and (model is None or model.is_causal)

    def change(self, fields: Mapping[str, str], in_code: str) -> str:
        """The command with the changed fields; without a spec or fields the change in the user's code."""
        return command(self.spec, fields) if self.spec and fields else in_code


def gpu_of_run(run: Run, ceilings: Ceilings | None) -> Gpu | None:
    """Rates of the run's device. Doubtful ceilings are ignored, and those for another device or thread count."""
    name = run.device_name
    hardware = find_hardware(name) if name else None
    if hardware is not None:
        return gpu_of(hardware)
    serve = ceilings and run.environment and ceilings.serves(run.environment.device) and not ceilings.doubt
    same = ceilings.ceilings if ceilings and serve else ()
    copy = next((c.best_per_s for c in same if c.name == "copy"), None)
    if name is None or copy is None:
        return None
    return measured_gpu(name, {c.dtype: c.best_per_s for c in same if c.name == "matmul" and c.dtype}, copy)


def case_of(run: Run, ceilings: Ceilings | None) -> Case:
    return Case(run=run, gpu=gpu_of_run(run, ceilings))


def in_seconds(times: Mapping[str, float]) -> tuple[Evidence, ...]:
    return tuple(Evidence(what=what, value=value, unit="s") for what, value in times.items())


def reached_bandwidth(name: str, gpu: Gpu) -> str:
    share = f"{streaming_share(name, gpu):.2g} (fitted on {gpu.rates.name})"
    return f"{share} of {_figure(gpu.bandwidth_bytes_per_s, 'B/s', gpu)}"


def stated_peak(dtype: str, gpu: Gpu) -> str:
    return f"{_figure(gpu.peaks[dtype], 'FLOP/s', gpu)} in {dtype}"


def _figure(per_s: float, unit: str, gpu: Gpu) -> str:
    if gpu.is_stated:
        return f"{format_rate(per_s, unit)} stated for {gpu.name}"
    return f"{format_rate(per_s, unit)}, inferred from `steplab doctor`"
