"""Hardware and software of a measurement."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    kind: str
    """cuda, mps or cpu."""
    name: str
    """Name from torch, or from the operating system for a CPU."""
    memory_bytes: int | None = None
    uuid: str | None = None
    """UUID by which NVML finds the GPU, regardless of CUDA_VISIBLE_DEVICES."""
    compute_capability: str | None = None
    sm_clock_hz: float | None = None
    """SM clock during the last warm-up steps, else during measured steps."""
    idle_sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_limits: tuple[str, ...] | None = None
    """NVML's reasons for a lower clock, read with `sm_clock_hz`; None: unknown."""
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
    """CUDA version that torch was built with; None: none."""
    cudnn: str | None = None
    triton: str | None = None
    driver: str | None = None
    flash_triton: str | None = None
    """Kernels that the attention flash_triton has here for 16-bit formats: hopper or portable; None: unknown, or none.
    """
    git_commit: str | None = None
    """Git commit of the working directory, with '+' for uncommitted changes; None outside a checkout."""
    load_average: float | None = None
    """The operating system's load average over the minute before measuring."""
    other_cpus: float | None = None
    """Mean number of logical processors kept busy by others during warm-up and measurement. None: unknown, several
    processes, or too short.
    """
    suspended_s: float | None = None
    """Seconds that the machine was suspended during warm-up and measurement; None: unknown."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables from an allowed list; no others are stored."""
    gaps: tuple[str, ...] = ()
    """Facts that could not be determined, with reasons."""
