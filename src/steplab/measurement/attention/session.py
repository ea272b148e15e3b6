"""Measures cells of a benchmark of attention in this process.

Implementations of one shape alternate, repeat by repeat, so that a disturbance affects all of them.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from steplab.measurement.attention.error import Inputs, Reference
from steplab.measurement.attention.variant import (
    AttentionVariant,
    MakeAttention,
    make_attention,
    make_inputs,
    try_both,
    try_forward,
)
from steplab.measurement.clock import ColdCaches, Marks, repeats_within
from steplab.measurement.jobs import CellsTask
from steplab.measurement.machine.device import open_device, refuse_unserved, samples_by
from steplab.measurement.machine.failures import failure_of
from steplab.measurement.machine.world import World
from steplab.measurement.observer import Observer
from steplab.measurement.runner import Broken, Runner, attempt
from steplab.ops.attention.api import choice_for
from steplab.records.attention import AttentionCell, AttentionMemory
from steplab.specs.attention import AttentionPass, AttentionStudy

T = TypeVar("T")


def measure_attention(
    task: CellsTask[AttentionStudy],
    observer: Observer,
    world: World | None = None,
    make: MakeAttention = make_attention,
) -> None:
    """Measure the cells. Raises UserError or Unsupported for an impossible request."""
    study = task.study
    device = open_device(study.device)
    for dtype in dict.fromkeys(study.cells[number].dtype for number in task.numbers):
        refuse_unserved(dtype, device.torch_device)
    runner = Runner(device, observer)
    if runner.run(task.groups, _Session(study, runner, make).measure):
        runner.tell_clocks()


class _Session:
    def __init__(self, study: AttentionStudy, runner: Runner, make: MakeAttention) -> None:
        self.study, self.runner, self.make = study, runner, make
        self.device, self.observer = runner.device, runner.observer
        self._caches = ColdCaches(runner.device)

    def measure(self, group: Sequence[int]) -> None:
        if "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled yet, and importing it takes seconds
            torch.compiler.reset()  # each shape is compiled as if it were the only one
        cells = [self.study.cells[index] for index in group]
        precise = "high" if cells[0].dtype == "tf32" else "highest"
        torch.set_float32_matmul_precision(precise)
        self.runner.begin(f"{cells[0].label}: inputs")
        inputs, failure = attempt("inputs", lambda: make_inputs(cells[0], self.device, self.study.seed), self.device)
        if inputs is None:
            for index, cell in zip(group, cells, strict=True):
                self.runner.observer.on_cell(index, AttentionCell(spec=cell, failure=failure))
            return
        self.runner.settle()
        variants = self._prepared(group, inputs)
        for name in self.study.passes:
            self._time(name, [variant for variant in variants if name in variant.ready])
        for variant in variants:
            self.runner.observer.on_cell(variant.index, variant.cell)

    def _prepared(self, group: Sequence[int], inputs: Inputs) -> list[AttentionVariant]:
        reference, note = self._reference(group, inputs)
        self.runner.settle()
        variants = []
        for index in group:
            cell = self.study.cells[index]
            self.observer.on_under_way([index])
            empty = AttentionCell(spec=cell, memory=AttentionMemory(), notes=(note,) if note else ())
            variant = AttentionVariant(index=index, cell=empty, function=self.make(cell), inputs=inputs)
            if cell.implementation == "auto":
                choice = choice_for(inputs.q, inputs.k, causal=cell.causal)
                variant.note(f"auto is {choice.implementation}: {choice.reason}")
            self.runner.begin(f"{cell.label} {cell.column}: first call")
            self._try(variant, reference)
            variants.append(variant)
        return variants

    def _reference(self, group: Sequence[int], inputs: Inputs) -> tuple[Reference | None, str]:
        cell, where = self.study.cells[group[0]], self.device.torch_device.type
        if not self.study.errors:
            return None, ""
        if where == "mps":
            return None, "errors against float64: this device has no float64"
        self.runner.begin(f"{cell.label}: float64")
        reference, note = None, ""
        try:
            reference = Reference(cell, inputs)
            reference.look_at_plain(cell, inputs)
        except Exception as error:
            what = "errors against float64" if reference is None else "error of plain attention"
            note = f"{what}: {failure_of(error, None).message}"
        if note:  # by now the failure's frames are gone
            self.runner.check(beyond=reference.num_bytes if reference else 0)
        elif reference and not reference.checked_heads:
            note = "errors against float64: one head alone would take too long"
        return reference, note

    def _try(self, variant: AttentionVariant, reference: Reference | None) -> None:
        stage = "forward"
        try:
            output = try_forward(variant, self.device)
            gradients: tuple[torch.Tensor, ...] = ()
            if self.study.passes != ("forward",):
                del output
                stage = "backward"
                output, gradients = try_both(variant, self.device)
            if reference and reference.checked_heads:
                stage = "comparison with float64"
                errors = reference.errors(output, gradients)
                variant.keep(errors=errors, checked_heads=reference.checked_heads)
        except Exception as error:
            variant.fail(error, stage, self.device)
        output = gradients = None  # type: ignore[assignment]
        if variant.cell.failure:
            self._after_failure(variant)

    def _after_failure(self, variant: AttentionVariant, others: Sequence[AttentionVariant] = ()) -> None:
        """Free a failure's memory; if some stays, report the result and end the process. If the device dies while cells
        alternate, no cell is named: another one may have caused the failure.
        """
        try:
            self.runner.check()
        except Broken as broken:
            died = broken.__cause__ is not None
            if died and others:
                raise RuntimeError("the device no longer answers") from broken
            if died and variant.cell.failure:
                variant.keep(failure=dataclasses.replace(variant.cell.failure, kind="crashed"))
            self.runner.observer.on_cell(variant.index, variant.cell)
            raise

    def _time(self, name: AttentionPass, variants: list[AttentionVariant]) -> None:
        if not variants:
            return
        label, study, call_s = variants[0].spec.label, self.study, 0.0
        self.runner.begin(f"{label}: {name}, warm-up")
        calls = {variant.index: variant.call(name) for variant in variants}

        def attempt(
            variant: AttentionVariant, work: Callable[[], T], others: Sequence[AttentionVariant] = ()
        ) -> T | None:
            try:
                return work()
            except Exception as error:
                variant.fail(error, name, self.device)
            # Not in the clause above: there the failure's frames still hold memory.
            variants.remove(variant)
            variant.ready.clear()
            self._after_failure(variant, others)
            return None

        for variant in list(variants):
            self.observer.on_under_way([variant.index])
            call_s += attempt(variant, partial(self._caches.warm_up, calls[variant.index], study.warmup_s)) or 0.0
        if not variants:
            return
        measured_s = study.measured_s * len(variants)
        repeats = repeats_within(measured_s, call_s, least=study.least_repeats, most=study.most_repeats)
        self.runner.begin(f"{label}: {name}", repeats)
        self.observer.on_under_way([variant.index for variant in variants])
        for variant in variants:
            variant.keep(interleaved=tuple(other.spec.column for other in variants if other is not variant))
        taking, turns = list(variants), [calls[variant.index] for variant in variants]

        def take(place: int) -> Marks | None:
            return attempt(taking[place], partial(self._caches.run_ahead, turns[place]), variants)

        timed = self._caches.in_turns(turns, repeats, take, self.observer.on_step)
        for variant, call, seconds in zip(taking, turns, timed, strict=True):
            if variant in variants:
                variant.keep(passes=(*variant.cell.passes, samples_by(self.device, name, seconds)))
                if call.num_waits:
                    variant.note(
                        f"{name}: in {call.num_waits} of {len(seconds)} repeats the device may have waited for Python, "
                        "which had not started all kernels in time"
                    )
