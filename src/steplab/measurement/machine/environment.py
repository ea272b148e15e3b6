import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import socket
import subprocess
from pathlib import Path

import torch

from steplab.git import git
from steplab.measurement.machine import nvml
from steplab.ops.attention.triton_tuning import kernels_known
from steplab.records.environment import DeviceInfo, Environment
from steplab.records.memory import Memory
from steplab.records.run import RankSamples
from steplab.records.timing import PhaseSamples
from steplab.records.validation import cleaned

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_SCALE_LAUNCH_QUEUES",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
"""Environment variables that a record may contain: they change speed or memory. Records are shared, and other variables
may hold secrets.
"""


def read_environment(device: torch.device) -> Environment:
    gaps: list[str] = []
    info, driver = _device_info(device, gaps)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return Environment(
        device=info,
        host=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        num_cpus=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=_dotted(cudnn) if cudnn else None,
        triton=_version_of("triton"),
        driver=driver,
        flash_triton=_flash_triton(device),
        git_commit=_git_commit(),
        load_average=_load_average(),
        variables={name: cleaned(os.environ[name]) for name in VARIABLES if name in os.environ},
        gaps=tuple(gaps),
    )


def read_clocks(environment: Environment, device: torch.device) -> Environment:
    """Add the GPU's present clocks, power limit, temperature and other processes."""
    environment = dataclasses.replace(environment, flash_triton=_flash_triton(device))
    if device.type != "cuda" or environment.device.uuid is None:
        return environment
    reading = nvml.read(environment.device.uuid)
    if isinstance(reading, str):
        return environment
    present = dataclasses.asdict(reading)
    del present["driver"]
    return dataclasses.replace(environment, device=dataclasses.replace(environment.device, **present))


def _device_info(device: torch.device, gaps: list[str]) -> tuple[DeviceInfo, str | None]:
    if device.type != "cuda":
        name = _cpu_name() if device.type == "cpu" else f"Apple GPU of {_cpu_name()}"
        return DeviceInfo(kind=device.type, name=name, threads=torch.get_num_threads()), None
    properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid) if hasattr(properties, "uuid") else None
    reading = nvml.read(uuid) if uuid else "this version of torch does not report the GPU's UUID"
    if isinstance(reading, str):
        gaps.append(f"clocks, power limit and driver version: {reading}")
    return (
        DeviceInfo(
            kind="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            uuid=uuid,
            idle_sm_clock_hz=None if isinstance(reading, str) else reading.sm_clock_hz,
            compute_capability=f"{properties.major}.{properties.minor}",
        ),
        None if isinstance(reading, str) else reading.driver,
    )


def _flash_triton(device: torch.device) -> str | None:
    if device.type != "cuda" or _version_of("triton") is None:
        return None
    return kernels_known(device)


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dotted(version: int) -> str:
    """Dotted version; cuDNN reports 91900 for 9.19.0, and 8902 for 8.9.2."""
    scale = 10_000 if version >= 90_000 else 1_000
    return f"{version // scale}.{version % scale // 100}.{version % 100}"


def _git_commit() -> str | None:
    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def samples_of_rank(
    rank: int, environment: Environment, back_to_back: tuple[PhaseSamples, ...], memory: Memory
) -> RankSamples:
    return RankSamples(
        rank=rank,
        host=socket.gethostname(),
        device_name=environment.device.name,
        back_to_back=back_to_back,
        peaks=memory.peaks,
        host_peak_bytes=memory.host_peak_bytes,
    )
