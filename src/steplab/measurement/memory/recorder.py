"""Records the memory of one more step, once everything is timed.

The allocator's history has address, time and line of each allocation; the profiler has the operators and ranges around
them. For a CPU the profiler's events are written in that form. No hook or mode changes autograd or the dispatcher.
"""

import dataclasses
import pickle
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from steplab.errors import Unsupported
from steplab.measurement import compat
from steplab.measurement.clock import OnStep
from steplab.measurement.machine.device import Device
from steplab.measurement.memory.allocation_events import AllocationEvents
from steplab.measurement.memory.cpu_history import PythonLines, cpu_snapshot, left_behind, storages_in_sight
from steplab.measurement.memory.marks import LINE, PHASE, STEP, StepMarks, StepSightings
from steplab.measurement.step.graphed import GraphedStep, Step
from steplab.measurement.step.spans import Spans
from steplab.measurement.step.step import ModelStep
from steplab.printing import MARK
from steplab.records.codec import encode
from steplab.records.memory_marks import BLOCK_ACTIONS, Marks, history_digest
from steplab.specs.step import AUTOCAST, StepSpec
from steplab.specs.step_choices import RECORD_THEIR_OWN


class MemoryRecorder:
    stage, export_stage = "memory", "snapshot"
    num_steps = 1

    def __init__(self, spec: StepSpec, device: Device, *, snapshot: Path, marks: Path) -> None:
        """Files to write: `snapshot` in torch's CUDA format, `marks` in that of records.memory_marks. Raises
        Unsupported if the allocator reports nothing.
        """
        self._spec, self._device, self._snapshot, self._marks = spec, device, snapshot, marks
        self._on_cuda = device.torch_device.type == "cuda"
        self._compiled = spec.compile != "off"
        if device.torch_device.type not in ("cpu", "cuda"):
            why = "its allocator keeps no history and reports nothing to torch.profiler"
            raise Unsupported(f"memory on device {device.torch_device.type}", why, "use --device cpu")

    def record(self, step: Step, on_step: OnStep, on_export: Callable[[], None] = lambda: None) -> tuple[str, ...]:
        """Run two steps and record the second. Returns no notes: they are in the marks."""
        if isinstance(step, GraphedStep):
            step = step.launched()
        device = self._device.torch_device
        sightings = StepSightings(step, device) if isinstance(step, ModelStep) else None
        lines = PythonLines(LINE) if self._lines_are_wanted(step) else None
        # the CPU's activity alone: memory is allocated there, for whichever device
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
            for phase in step.phases:  # the step before it, for the memory it leaves behind
                phase.run()
            self._device.synchronize()
            module = None if self._compiled else step.module
            with Spans(nvtx=False).on(module) as left_out:
                snapshot, before, counted = self._watch_step(step, sightings, lines)
        on_step(0)
        on_export()
        events = AllocationEvents(compat.profiled_events(profiler), device)
        autocast = self._spec.precision in AUTOCAST
        seen = StepMarks(events, sightings, autocast=autocast)
        notes = self._notes(step, left_out, has_lines=lines is not None)
        marks = self._agreed(seen, snapshot, counted, notes)
        if snapshot is None:
            before = left_behind(seen.memory_before) | before
            snapshot = cpu_snapshot(seen.memory, before, lines.stack if lines else lambda ranges: ())
        self._write(marks, snapshot)
        return ()

    def _watch_step(
        self, step: Step, sightings: StepSightings | None, lines: PythonLines | None
    ) -> tuple[dict[str, Any] | None, dict[int, int], Marks]:
        before = {} if self._on_cuda else storages_in_sight()
        self._device.reset_peak()
        with compat.memory_history() if self._on_cuda else nullcontext():
            with record_function(STEP), sightings.watching(modules=not self._compiled) if sightings else nullcontext():
                _run(step, sightings, lines)
                self._device.synchronize()
            counted = self._counted()
            return compat.memory_snapshot() if self._on_cuda else None, before, counted

    def _counted(self) -> Marks:
        peak = self._device.peak("step")
        if peak is None:
            return Marks(source="cpu allocator")
        device = self._device.torch_device
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return Marks(
            device_index=device.index or 0,
            counted_peak_bytes=peak.peak_allocated_bytes,
            reserved_bytes=peak.peak_reserved_bytes,
            outside_bytes=total_bytes - free_bytes - torch.cuda.memory_reserved(device),
        )

    def _agreed(self, seen: StepMarks, snapshot: dict[str, Any] | None, counted: Marks, notes: list[str]) -> Marks:
        if snapshot is not None:
            trace = snapshot["device_traces"][counted.device_index]
            history = [entry["addr"] for entry in trace if entry["action"] == "alloc"]
            if history != [event.address for event in seen.allocations]:
                notes.append(
                    f"marks: the allocator's history has {len(history)} allocations of this step, and torch.profiler "
                    f"{len(seen.allocations)} others, so their owners are not known; a model that allocates "
                    "from its own threads causes this"
                )
                return dataclasses.replace(counted, notes=tuple(notes))
        return dataclasses.replace(seen.marks(counted), notes=tuple(notes))

    def _lines_are_wanted(self, step: Step) -> bool:
        modules = step.module.modules() if step.module is not None else ()
        return not self._on_cuda and not self._compiled and not any(map(compat.minds_function_modes, modules))

    def _notes(self, step: Step, left_out: tuple[str, ...], *, has_lines: bool) -> list[str]:
        notes = []
        if not isinstance(step, ModelStep):
            notes.append(
                "categories: a user's whole step has no phases, so its parameters, gradients and activations cannot be "
                "distinguished"
            )
        if self._compiled:
            notes.append("modules: a compiled step is recorded by phase only, because its graph has no modules")
            if self._spec.precision in AUTOCAST:
                notes.append(
                    "autocast copies: a compiled graph casts weights among other things; a copy counts as an "
                    "activation if it is saved for backward, and as temporary otherwise"
                )
        elif left_out:
            shown = ", ".join(name or "the model" for name in left_out)
            notes.append(f"modules: none inside {shown}, where hooks would change what runs")
        if self._on_cuda and self._spec.compile in RECORD_THEIR_OWN:
            notes.append(
                "activations: CUDA graphs replay in a memory pool of their own, allocated before the step; what they "
                "use of it is not recorded, and counts as workspaces"
            )
        if self._spec.cuda_graph == "step":
            notes.append(
                "CUDA graphs: a replay allocates no memory, so this is the step's memory without them, as "
                "while recording"
            )
        if not self._on_cuda:
            notes.append("cpu allocator: memory that a library (MKL, oneDNN) allocates for itself is not recorded")
            if not has_lines:
                notes.append("lines: not recorded, because recording them would change what runs")
        return notes

    def _write(self, marks: Marks, snapshot: dict[str, Any]) -> None:
        marks = dataclasses.replace(marks, history_sha256=_digest(snapshot["device_traces"][marks.device_index]))
        unfinished = self._snapshot.with_name(f"unfinished-{self._snapshot.name}")
        with unfinished.open("wb") as file:
            pickle.dump({"comment": MARK, **snapshot}, file)
        self._marks.write_bytes(f'{{"comment":"{MARK}",'.encode() + encode(marks)[1:])
        unfinished.replace(self._snapshot)


def _run(step: Step, sightings: StepSightings | None, lines: PythonLines | None) -> None:
    if sightings:
        sightings.see_what_is_there()
    for phase in step.phases:
        if sightings and phase.name == "forward":
            sightings.begin_forward()
        with record_function(f"{PHASE}{phase.name}"), lines or nullcontext():
            phase.run()
        if sightings and phase.name == "forward":
            sightings.see_graph()
    if sightings:
        sightings.see_what_is_there()


def _digest(trace: list[dict[str, Any]]) -> str:
    events = [entry for entry in trace if entry["action"] in BLOCK_ACTIONS]
    layout = f"<{len(events)}q"
    return history_digest(
        bytes(BLOCK_ACTIONS.index(entry["action"]) for entry in events),
        struct.pack(layout, *(entry["addr"] for entry in events)),
        struct.pack(layout, *(entry["size"] for entry in events)),
    )
