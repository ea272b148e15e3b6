"""Turns an exception during a measurement into a Failure."""

import os
import re
import traceback
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from steplab.errors import ERRORS
from steplab.measurement import compat
from steplab.measurement.machine.causes import cause_of
from steplab.measurement.machine.device import Device
from steplab.printing import remark, text_of
from steplab.records.failure import Failure
from steplab.records.memory import PeakMemory
from steplab.specs.step import StepSpec
from steplab.units import format_bytes

_LAST_LINES = 12
_NO_KERNEL = ("No available kernel", "No viable backend")


def failure_from(error: BaseException, stage: str, device: Device | None, no_kernel: str = "") -> Failure:
    """`no_kernel`: message if attention has no kernel for its inputs."""
    refused = refused_memory(error, stage, device)
    if refused is None and no_kernel and any(said in str(error) for said in _NO_KERNEL):
        return Failure(kind="error", message=no_kernel, phase=stage)
    return refused or failure_of(error, stage)


def failure_of_step(error: BaseException, stage: str, spec: StepSpec, device: Device) -> Failure:
    lacks = f"attention {spec.attention} has no kernel for {spec.precision} on {device.torch_device.type}; "
    return failure_from(error, stage, device, lacks + "choose --attention sdpa, or another precision")


def place_of(error: BaseException) -> str:
    """File and line of an error in user or model code, as 'model.py:12'; else empty."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_underneath(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def place_of_call() -> str:
    for frame, line in traceback.walk_stack(None):
        if not _is_underneath(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return ""


def _is_underneath(filename: str) -> bool:
    folder = Path(torch.__file__).parent
    own = (folder, folder.with_name("triton"), Path(__file__).parents[2])
    pythons = filename.startswith(os.path.dirname(os.__file__) + os.sep) and "-packages" + os.sep not in filename
    generated = filename.startswith("<") or "torchinductor" in filename
    return pythons or generated or filename.startswith(tuple(f"{folder}{os.sep}" for folder in own))


def refused_memory(error: BaseException, stage: str, device: Device | None) -> Failure | None:
    if isinstance(error, torch.OutOfMemoryError):
        requested_bytes = compat.last_refused_bytes() or compat.bytes_in_message(_first_line(error))
        return _out_of_memory(stage, requested_bytes, device.peak("step") if device else None)
    if "DefaultCPUAllocator: can't allocate memory" in (text := text_of(error)):
        refused = re.search(r"you tried to allocate (\d+) bytes", text)
        return _out_of_memory(stage, int(refused[1]) if refused else None, None)
    return None


def lack_of_host_memory(state_bytes: int) -> Failure | None:
    """The failure of a step if weights, gradients and optimizer state exceed the host's memory; else None.

    It is checked before building: a host without memory swaps for minutes, and ends other programs.
    """
    there = psutil.virtual_memory().total + psutil.swap_memory().total
    if state_bytes <= there:
        return None
    message = f"parameters, gradients and optimizer state take {format_bytes(state_bytes)}, and this machine has "
    message += f"{format_bytes(there)} of memory; choose a smaller --model, or a GPU"
    return Failure(kind="out_of_memory", message=message, phase="build")


def failure_of(error: BaseException, stage: str | None) -> Failure:
    text = text_of(error)
    lines = tuple(remark(line) for line in text.splitlines()[-_LAST_LINES:])
    cause, first_line = cause_of(text), _first_line(error)
    if not isinstance(error, ERRORS) and (place := place_of(error)):
        first_line += f" ({place})"
    return Failure(
        kind=cause.kind if cause else "error",
        message=f"{cause.words} ({first_line})" if cause else first_line,
        phase=stage,
        last_lines=lines if len(lines) > 1 else (),
    )


def _out_of_memory(stage: str, requested_bytes: int | None, peak: PeakMemory | None) -> Failure:
    asked = f"{format_bytes(requested_bytes)} more were requested" if requested_bytes else "an allocation was refused"
    held = f", with at most {format_bytes(peak.peak_allocated_bytes)} in tensors before" if peak else ""
    return Failure(
        kind="out_of_memory",
        message=f"{asked}{held} ({stage})",
        phase=stage,
        requested_bytes=requested_bytes,
        peak_allocated_bytes=peak.peak_allocated_bytes if peak else None,
    )


def _first_line(error: BaseException) -> str:
    lines = [remark(line.strip()) for line in text_of(error).splitlines() if line.strip()]
    if isinstance(error, ERRORS):  # steplab's own errors are shown unchanged
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
