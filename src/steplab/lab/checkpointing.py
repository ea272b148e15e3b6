"""Resolve checkpointing `auto`: the least recomputation whose memory, by `plan memory`, fits the GPU. Tried in order:
none; selective, without repeated matrix products; full for as few of the first blocks as possible.
"""

import bisect
from dataclasses import dataclass, replace
from typing import TypeVar

from steplab.errors import Unsupported, UserError
from steplab.lab.machine import visible_gpu, visible_gpus
from steplab.lab.predicting import memory_of
from steplab.plan.cards import safe_device_bytes, usable_of
from steplab.records.numerics import Numerics
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.records.step_time import StepTimePrediction
from steplab.specs.checkpointing import AUTO
from steplab.specs.hardware import HardwareSpec
from steplab.specs.step import StepSpec
from steplab.units import format_bytes

Noted = TypeVar("Noted", Run, Numerics, MemoryPrediction, StepTimePrediction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    spec: StepSpec
    notes: tuple[str, ...] = ()
    """The choice and its reason; empty if the step named its checkpointing."""


@dataclass(frozen=True, slots=True)
class Room:
    gpu: str
    usable_bytes: int
    """A step that needs no more surely runs."""
    most_bytes: int
    """A step that needs more does not fit."""

    def holds(self, predicted: MemoryPrediction) -> bool:
        return _safe_bytes(predicted) <= self.usable_bytes


def choose_checkpointing(spec: StepSpec, gpu: HardwareSpec | None = None) -> Chosen:
    """Choose the step's checkpointing for `gpu`, by default this machine's; without a GPU, recompute nothing. Raises
    UserError if the step does not fit even with full checkpointing, or its memory is unpredictable.
    """
    if spec.checkpointing != AUTO:
        return Chosen(spec=spec)
    if not spec.checkpoints_apply:
        return _chosen(spec, "none", "nothing is saved for a backward pass that steplab could recompute")
    room = Room(gpu.name, *usable_of(gpu)) if gpu else _room_here(spec)
    if room is None:
        return _chosen(spec, "none", "there is no GPU whose memory could be too small")
    try:
        return _least(spec, room, gpu)
    except Unsupported as error:
        choices = "none, selective or full"
        raise UserError(f"checkpointing auto goes by predicted memory: {error}; or name {choices} yourself") from error


def with_notes(found: Noted, notes: tuple[str, ...]) -> Noted:
    return replace(found, notes=(*found.notes, *notes)) if notes else found


def _least(spec: StepSpec, room: Room, gpu: HardwareSpec | None) -> Chosen:
    def predicted(choice: str) -> MemoryPrediction:
        return memory_of(replace(spec, checkpointing=choice, device="auto"), gpu=gpu)

    shape = spec.model.shape
    before: tuple[str, MemoryPrediction] | None = None
    for choice in ("none", "selective") if shape else ("none",):  # of transformers every layer or none
        found = predicted(choice)
        if room.holds(found):
            return _fitting(spec, room, choice, found, before)
        before = choice, found
    # The search takes each further block to need less memory. The last one is another matter: backward begins with it,
    # so that recomputing it saves nothing.
    num_layers = shape.num_layers if shape else 1
    numbers = range(1, num_layers)
    fewest = bisect.bisect_left(numbers, True, key=lambda number: room.holds(predicted(f"first_{number}"))) + 1
    choices = [f"first_{fewest}"] if fewest in numbers else ["full", *[f"first_{number}" for number in numbers[-1:]]]
    found, choice = min(((predicted(choice), choice) for choice in choices), key=lambda entry: _safe_bytes(entry[0]))
    assert found.least_device_bytes is not None
    if found.least_device_bytes > room.most_bytes:
        least, most = format_bytes(found.least_device_bytes), format_bytes(room.most_bytes)
        raise UserError(
            f"the step does not fit even with full checkpointing: predicted {least} of the {most} of {room.gpu}; "
            "take a smaller batch or context, or more GPUs"
        )
    return _fitting(spec, room, choice, found, before)


def _fitting(
    spec: StepSpec, room: Room, choice: str, found: MemoryPrediction, before: tuple[str, MemoryPrediction] | None
) -> Chosen:
    why = f"predicted peak {format_bytes(found.peak_bytes)}, sure to run with {format_bytes(_safe_bytes(found))}"
    why += f" of the {format_bytes(room.usable_bytes)} of {room.gpu}"
    if not room.holds(found):
        why = f"too tight to promise: {why}"
    if before:
        why += f"; {before[0]} would take {format_bytes(_safe_bytes(before[1]))}"
    if found.kind == "at_least":
        why += "; the prediction of this step is a lower bound"
    return _chosen(spec, choice, why)


def _chosen(spec: StepSpec, choice: str, why: str) -> Chosen:
    return Chosen(spec=replace(spec, checkpointing=choice), notes=(f"checkpointing auto: {choice} ({why})",))


def _safe_bytes(predicted: MemoryPrediction) -> int:
    if predicted.safe_device_bytes is not None:
        return predicted.safe_device_bytes
    return safe_device_bytes(predicted.reserved_bytes or predicted.peak_bytes)


def _room_here(spec: StepSpec) -> Room | None:
    """This machine's GPU memory; None without a GPU. Raises UserError if the driver does not report it."""
    kind, _, number = spec.device.partition(":")
    if kind != "cuda" and not (kind == "auto" and visible_gpus()):
        return None
    found = visible_gpu(int(number or 0))
    if found is None:
        raise UserError(
            "checkpointing auto needs to know the memory of the GPU, and the CUDA driver does not tell; "
            "name none, selective or full yourself"
        )
    return Room(gpu=found.name, usable_bytes=found.memory_bytes, most_bytes=found.memory_bytes)
