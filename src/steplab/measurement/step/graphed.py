"""A step recorded once as CUDA graphs, one per phase, and then replayed: one call launches all kernels of a phase.

Replays use the recorded addresses, and run no Python of the step. So batches are copied into permanent buffers,
gradients live in the graphs' memory, and the optimizer counts steps on the device.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from steplab.errors import ERRORS, Unsupported
from steplab.measurement.clock import Phase
from steplab.measurement.machine.device import Device
from steplab.measurement.machine.failures import place_of
from steplab.measurement.step.step import FIRST, BuiltStep, ModelStep, on_stream
from steplab.measurement.tensors import with_tensors
from steplab.records.memory import PeakMemory

_STEPS_BEFORE = 3
"""As in torch's example (pytorch.org/docs/stable/notes/cuda.html, "Whole-network capture"); the first compiles and
makes the optimizer's state.
"""
_REMOVE = (
    "remove what waits for the GPU or copies from it (.item(), .tolist(), .cpu(), a condition on a tensor's value, "
    "torch.nonzero), or use --cuda-graph off"
)


class CudaGraphs:
    """CUDA graphs that share a memory pool, because replay follows the recorded order."""

    def __init__(self, device: torch.device) -> None:
        # One stream for the steps before and the recordings: cuBLAS keeps a workspace for each. Its kernels precede a
        # concurrent update's.
        self._stream = torch.cuda.Stream(device, priority=FIRST)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def apart(self) -> AbstractContextManager[None]:
        """A context for recording and the steps before: the default stream cannot be recorded."""
        return on_stream(self._stream)

    def record(self, run: Callable[[], object]) -> Callable[[], object]:
        """Call `run` without executing its kernels; returns the function that executes them. Raises errors of `run` and
        of the capture.
        """
        graph = torch.cuda.CUDAGraph()
        first: Exception | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    run()
                except Exception as error:
                    first = error
                    raise
        except Exception as error:  # ending a failed capture raises a further error
            _free_random_numbers(self._stream.device)
            raise first or error from None
        self._graphs.append(graph)
        return graph.replay

    def forget(self) -> None:
        while self._graphs:
            self._graphs.pop().reset()


def _free_random_numbers(device: torch.device) -> None:
    """Replace the CUDA generator's state by a copy: after a failed capture torch takes the old one for still captured
    (github.com/pytorch/pytorch/issues/171263).
    """
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


class GraphedStep:
    def __init__(self, step: BuiltStep, device: Device, model: str, recorder: CudaGraphs | None = None) -> None:
        """Wrap a built step. Raises Unsupported for a user's whole step."""
        self._what = f"cuda_graph step for {model}"
        if not isinstance(step, ModelStep):
            why = "its factory returns a whole step; its batches and optimizer are unknown"
            raise Unsupported(self._what, why, "have it return (module, make_batch), or use --cuda-graph off")
        self._step, self._device = step, device
        self._recorder = recorder or CudaGraphs(device.torch_device)
        self._replayed = 0
        self.module = step.module
        self.batches = step.batches
        self.phases: tuple[Phase, ...] = ()
        self.peak: PeakMemory | None = None
        """Peak while recording, because replays allocate nothing; None if the device keeps none."""
        self.phase_peaks: dict[str, PeakMemory] = {}

    def record(self) -> None:
        """Record the step. Raises Unsupported if that is impossible."""
        with self._recorder.apart():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*capturable=True.*")  # it is captured below
                for _ in range(_STEPS_BEFORE):
                    self._step.run()
            self._device.free_unused()
            inputs = with_tensors(self.batches[0], Tensor.clone)
            self._step.batches = [inputs]
            self.phases = tuple(self._recorded(phase, inputs) for phase in self._step.phases)
        for peak in self.phase_peaks.values():
            self.peak = replace(peak.with_larger_of(self.peak or peak), phase="step")

    def launched(self) -> ModelStep:
        """Free the recording, and return the original step."""
        self.phases = ()
        self._recorder.forget()
        self._device.free_unused()
        self._step.batches = self.batches
        return self._step

    def _recorded(self, phase: Phase, inputs: Any) -> Phase:
        self._device.reset_peak()
        try:
            replay = self._recorder.record(phase.run)
        except (*ERRORS, torch.OutOfMemoryError):
            raise
        except Exception as error:  # it ran before, so it is the capture that it does not bear
            said = (str(error).splitlines() or [type(error).__name__])[0]
            where = f" at {place}" if (place := place_of(error)) else ""
            why = f"its {phase.name} cannot be captured{where} ({said})"
            raise Unsupported(self._what, why, _REMOVE) from error
        if peak := self._device.peak(phase.name):
            self.phase_peaks[phase.name] = peak.with_larger_of(self.phase_peaks.get(phase.name, peak))
        if phase.name != "forward":
            return Phase(name=phase.name, run=replay)

        def run() -> None:
            self._take(inputs)
            replay()

        return Phase(name=phase.name, run=run)

    def _take(self, inputs: Any) -> None:
        _copy(self.batches[self._replayed % len(self.batches)], inputs, self._what)
        self._replayed += 1


Step = BuiltStep | GraphedStep


def _copy(batch: Any, inputs: Any, what: str) -> None:
    if isinstance(batch, Tensor) and isinstance(inputs, Tensor) and batch.shape == inputs.shape:
        inputs.copy_(batch, non_blocking=True)
    elif isinstance(batch, dict) and isinstance(inputs, dict) and batch.keys() == inputs.keys():
        for key, value in batch.items():
            _copy(value, inputs[key], what)
    elif isinstance(batch, (tuple, list)) and isinstance(inputs, (tuple, list)) and len(batch) == len(inputs):
        for value, static in zip(batch, inputs, strict=True):
            _copy(value, static, what)
    elif type(batch) is not type(inputs) or isinstance(batch, (Tensor, dict, tuple, list)) or batch != inputs:
        why = "its batches differ in shape, or in values that are no tensors, and a recorded step takes one form"
        raise Unsupported(what, why, "make batches of one shape, or use --cuda-graph off")
