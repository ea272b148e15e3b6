"""Where and with what a measurement was made."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """The device a run was measured on."""

    kind: str
    """cuda, mps or cpu."""
    name: str
    """As torch (or, for a CPU, the operating system) names it."""
    memory_bytes: int | None = None
    """Total memory of a GPU."""
    uuid: str | None = None
    """The GPU's identity; NVML's figures below are read for this one, whatever CUDA_VISIBLE_DEVICES says."""
    compute_capability: str | None = None
    """CUDA compute capability, '9.0'."""
    sm_clock_hz: float | None = None
    """Clock of the SMs, read while the last warm-up steps (without any: the measured ones) were still running."""
    memory_clock_hz: float | None = None
    """Clock of the memory, read at the same time."""
    power_limit_w: float | None = None
    """Power limit in force."""
    temperature_c: float | None = None
    """Temperature in degrees Celsius, read at the same time."""
    threads: int | None = None
    """Threads torch computes with on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Everything that can explain why two runs of one spec differ."""

    device: DeviceInfo
    """The device."""
    host: str
    """Operating system and machine type."""
    cpu: str
    """Name of the processor."""
    num_cpus: int
    """Logical processors of the machine."""
    python: str
    """Python's version."""
    torch: str
    """torch's version."""
    cuda: str | None = None
    """CUDA version torch was built for."""
    cudnn: str | None = None
    """cuDNN's version."""
    triton: str | None = None
    """Triton's version; None where it is not installed."""
    driver: str | None = None
    """GPU driver's version, from NVML."""
    git_commit: str | None = None
    """Commit of the working directory, '+' behind it if files differ from it; None outside a checkout."""
    variables: dict[str, str] = field(default_factory=dict)
    """Values of the allow-listed environment variables that were set; never any other."""
    gaps: tuple[str, ...] = ()
    """What could not be found out, and why."""
