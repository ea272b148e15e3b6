"""What this machine has: its GPUs, and its ceilings, for devices outside the catalogue of hardware."""

import ctypes
import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.lab.keeping import Place, keep, open_store
from steplab.measurement.processes.launch import ceilings_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.ceilings import Ceilings
from steplab.specs.layout import check_device


def doctor(
    *,
    device: str = "auto",
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    place: Place | None = None,
) -> Ceilings:
    """Measure the machine's matmul and copy ceilings, and store them for later MFU figures.

    Raises UserError for a device that does not exist, SteplabError if the store cannot be written.
    """
    check_device(device)
    with open_store(store, write=True) as opened:
        ceilings = ceilings_in_child(device, timeout_s=timeout_s, on_progress=on_progress)
        return keep(opened, ceilings, place)


def visible_gpus() -> int:
    """The number of CUDA devices that torch will probably find, estimated without importing torch."""
    try:
        if "+cpu" in importlib.metadata.version("torch"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        return 0
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if named is None else min(there, len([part for part in named.split(",") if part.strip()]))


def device_kind_here(name: str) -> str:
    """The kind of device that a name probably is on this machine, estimated without importing torch."""
    kind = name.partition(":")[0]
    if kind != "auto":
        return kind
    if visible_gpus():
        return "cuda"
    return "mps" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpu:
    """A GPU of this machine as torch would tell of it."""

    name: str
    """torch.cuda.get_device_name()."""
    memory_bytes: int
    """Total memory in bytes."""


def visible_gpu(number: int = 0, load: Callable[[str], Any] = ctypes.CDLL) -> VisibleGpu | None:
    """The GPU of this number, by the CUDA driver (CUDA driver API, cuDeviceGetName and cuDeviceTotalMem), which needs
    neither torch nor a context on it; None where the driver does not tell."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return None
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), number)
        or driver.cuDeviceGetName(name, len(name), device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    )
    return None if failed else VisibleGpu(name=name.value.decode(errors="replace"), memory_bytes=total.value)
