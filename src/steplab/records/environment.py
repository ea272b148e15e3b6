"""The hardware and software of a measurement."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """The device a run was measured on."""

    kind: str
    """Kind of device: cuda, mps or cpu."""
    name: str
    """Name of the device by torch or, for a CPU, by the operating system."""
    memory_bytes: int | None = None
    """Total memory of a GPU in bytes."""
    uuid: str | None = None
    """UUID of the GPU, by which NVML finds the GPU for the figures below whatever CUDA_VISIBLE_DEVICES says."""
    compute_capability: str | None = None
    """CUDA compute capability, such as '9.0'."""
    sm_clock_hz: float | None = None
    """Clock of the SMs in Hz, read while the last warm-up steps (or, without any, the measured steps) were running."""
    idle_sm_clock_hz: float | None = None
    """Clock of the SMs in Hz, read before the measurement."""
    memory_clock_hz: float | None = None
    """Clock of the memory in Hz, read at the same time."""
    power_limit_w: float | None = None
    """Power limit in force, in watts."""
    temperature_c: float | None = None
    """Temperature in degrees Celsius, read at the same time."""
    clock_limits: tuple[str, ...] | None = None
    """Reasons for which the GPU ran below its highest clock, read at the same time; None: not known."""
    other_processes: int | None = None
    """Number of other processes that had the GPU open, read at the same time; None: not known."""
    threads: int | None = None
    """Number of threads that torch computes with on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The hardware and software of a measurement, which may explain why two runs of one spec differ."""

    device: DeviceInfo
    """The device that computed."""
    host: str
    """Operating system and machine type."""
    cpu: str
    """Name of the processor."""
    num_cpus: int
    """Number of logical processors of the machine."""
    python: str
    """Version of Python."""
    torch: str
    """Version of torch."""
    cuda: str | None = None
    """CUDA version that torch was built for; None: without CUDA."""
    cudnn: str | None = None
    """Version of cuDNN; None: without it."""
    triton: str | None = None
    """Version of Triton; None if it is not installed."""
    driver: str | None = None
    """Version of the GPU driver, from NVML."""
    flash_triton: str | None = None
    """Kernels that attention flash_triton has there in bf16 and fp16: hopper or portable; None: not known, or none."""
    git_commit: str | None = None
    """Commit of the working directory, followed by '+' if files differ from it; None outside a checkout."""
    load_average: float | None = None
    """Mean number of runnable processes over the minute before the measurement, as the operating system has it."""
    other_cpus: float | None = None
    """Mean number of logical processors that other processes kept busy during the measurement, of a step that is its
    warm-up and the measured steps; None: not known, as for steps of several processes and those that were over too soon
    to tell."""
    suspended_s: float | None = None
    """Seconds for which the machine was suspended (asleep) during the warm-up and the measured steps; None: not
    known."""
    variables: dict[str, str] = field(default_factory=dict)
    """Values of the environment variables on an allow-list that were set; no other variable is stored."""
    gaps: tuple[str, ...] = ()
    """What could not be determined, and why."""
