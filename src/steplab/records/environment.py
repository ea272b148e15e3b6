"""Hardware and software of a measurement."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    kind: str
    """cuda, mps or cpu."""
    name: str
    """Name by torch or, for a CPU, by the operating system."""
    memory_bytes: int | None = None
    uuid: str | None = None
    """UUID for NVML, which finds the GPU regardless of CUDA_VISIBLE_DEVICES."""
    compute_capability: str | None = None
    """Such as '9.0'."""
    sm_clock_hz: float | None = None
    """SM clock in Hz during the last warm-up steps, else during measured steps."""
    idle_sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_limits: tuple[str, ...] | None = None
    """Reasons for a lower clock, read with `sm_clock_hz`; None: unknown."""
    other_processes: int | None = None
    """Other processes with the GPU open, read with `sm_clock_hz`; None: unknown."""
    threads: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    device: DeviceInfo
    host: str
    cpu: str
    num_cpus: int
    python: str
    torch: str
    cuda: str | None = None
    """CUDA version of torch's build; None: without CUDA."""
    cudnn: str | None = None
    triton: str | None = None
    driver: str | None = None
    flash_triton: str | None = None
    """Kernels of attention flash_triton in 16 bits: hopper or portable; None: unknown, or none."""
    git_commit: str | None = None
    """Commit of the working directory, with '+' if files differ; None outside a checkout."""
    load_average: float | None = None
    """Mean runnable processes in the minute before, from the operating system."""
    other_cpus: float | None = None
    """Logical processors kept busy by other processes during warm-up and measured steps, on average. None: unknown,
    several processes, or too short.
    """
    suspended_s: float | None = None
    """Seconds of suspension during warm-up and measured steps; None: unknown."""
    variables: dict[str, str] = field(default_factory=dict)
    """Allowed environment variables that were set; others are never stored."""
    gaps: tuple[str, ...] = ()
    """Facts that could not be determined, with reasons."""
