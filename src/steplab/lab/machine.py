"""Measure the ceilings of this machine, for devices outside the catalogue of hardware."""

import importlib.metadata
import os
import platform
from pathlib import Path

from steplab.lab.keeping import Place, keep, open_store
from steplab.measurement.processes.launch import ceilings_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.ceilings import Ceilings
from steplab.specs.device import check_device


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
