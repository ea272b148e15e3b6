"""Describe this machine: its GPUs, measured peaks, and torchrun's processes."""

import atexit
import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.errors import UserError
from steplab.lab.keeping import Place, keep, open_store
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.processes.launch import ceilings_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.ceilings import Ceilings
from steplab.records.failure import Failure
from steplab.specs.layout import SINGLE, Layout, check_device, process_count, with_processes
from steplab.specs.step import StepSpec

_FIRST_STORES_S = 5.0


def doctor(
    *,
    device: str = "auto",
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    place: Place | None = None,
) -> Ceilings:
    """Measure peak matmul and copy rates, and store them for later MFU figures. Raises UserError for an absent device,
    SteplabError if the store cannot be written.
    """
    check_device(device)
    with open_store(store, write=True) as opened:
        ceilings = ceilings_in_child(device, timeout_s=timeout_s, on_progress=on_progress)
        return keep(opened, ceilings, place)


def visible_gpus() -> int:
    """Number of CUDA devices that torch will probably find."""
    try:
        if "+cpu" in importlib.metadata.version("torch"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        return 0
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if named is None else min(there, len([part for part in named.split(",") if part.strip()]))


def device_kind_here(name: str) -> str:
    """The device kind (cuda, mps, cpu) that `name` probably means here, without importing torch."""
    kind = name.partition(":")[0]
    if kind != "auto":
        return kind
    if visible_gpus():
        return "cuda"
    return "mps" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpu:
    name: str
    memory_bytes: int


def visible_gpu(number: int = 0, load: Callable[[str], Any] = ctypes.CDLL) -> VisibleGpu | None:
    """A GPU's name and memory by the CUDA driver, without creating a context; None if unreported."""
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


def is_first_rank() -> bool:
    """True for rank 0, which stores and prints. Raises UserError if torchrun's variables contradict each other."""
    around = torchrun_around()
    return around is None or around.is_first


def fields_here(
    fields: Mapping[str, object], gpus: int | None = None, processes: int | None = None
) -> dict[str, object]:
    """The step's fields, with the layout from `gpus`, `processes` or torchrun. Raises UserError for contradictions."""
    given, around = with_processes(fields, gpus, processes), torchrun_around()
    return given if around is None or "layout" in given else {**given, "layout": f"dp={around.size}"}


def processes_here(gpus: int | None, processes: int | None, default: tuple[int, str]) -> tuple[int, str]:
    """Number of processes and their device, cuda or cpu: as requested, else torchrun's, else `default`. Raises
    UserError for contradictions.
    """
    around = torchrun_around()
    if gpus is None and processes is None:
        return (around.size, "cuda" if visible_gpus() else "cpu") if around else default
    count, device = process_count(gpus, processes)
    if around is not None and around.size != count:
        raise UserError(f"torchrun started {around.size} processes, not {count}; leave --gpus and --processes out")
    return count, device


def spread_here(spec: StepSpec) -> StepSpec:
    """The step, by default with dp over torchrun's processes. Raises UserError if its layout needs another number of
    processes.
    """
    around = torchrun_around()
    if around is None or spec.layout.world_size == around.size:
        return spec
    if spec.layout == SINGLE:
        return dataclasses.replace(spec, layout=Layout(dp=around.size))
    raise UserError(
        f"torchrun started {around.size} processes, but layout {spec.layout} takes {spec.layout.world_size}; give "
        f"torchrun --nproc-per-node and --nnodes for {spec.layout.world_size} in all, or leave --layout out"
    )


def refuse_torchrun(verb: str) -> None:
    around = torchrun_around()
    if around is not None:
        raise UserError(
            f"torchrun started {around.size} processes, and each would {verb}; run steplab without torchrun "
            "(--gpus, --processes and --layout start processes too)"
        )


def is_told_here(failure: Failure) -> bool:
    """True if this process reports the failure: rank 0, and the rank that failed."""
    around = torchrun_around()
    return around is None or around.is_first or failure.rank == around.rank


def let_the_first_store() -> None:
    """Delay this exit, so that rank 0 can store: after an error torchrun ends the other ranks."""
    atexit.register(time.sleep, _FIRST_STORES_S)
