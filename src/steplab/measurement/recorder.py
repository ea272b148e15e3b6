"""Times the steps of a user's own training loop, in one process or in each of several."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

from steplab.errors import UserError
from steplab.measurement.machine.device import Device, host_peak_bytes, open_device, samples_by
from steplab.measurement.machine.environment import read_clocks, read_environment, samples_of_rank
from steplab.measurement.machine.failures import failure_of, refused_memory
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.step.spans import Spans, activities_on, note_on_left_out
from steplab.parallel.collectives import GroupCollectives
from steplab.printing import text_of
from steplab.records.codec import new_head
from steplab.records.failure import Failure
from steplab.records.memory import Memory
from steplab.records.run import RankSamples, Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.records.validation import LARGEST, LONGEST_NAME, cleaned
from steplab.units import counted


class ProfiledSteps:
    def __init__(self, steps: range | None, module: nn.Module | None, trace: Path | None) -> None:
        """`steps`: consecutive step numbers above 0, else UserError; None: no profile. `trace` None: another rank
        writes it.
        """
        if steps is not None and not _can_be_profiled(steps):
            raise UserError(
                f"profile must be consecutive steps after the first, which is 0, such as range(20, 23), not "
                f"{text_of(steps)[:80]}"
            )
        self.notes: list[str] = []
        self.trace: Path | None = None
        """Path of the trace; None until complete, or if profiling failed."""
        self._steps, self._module = steps or range(0), module
        self._path = trace if steps else None
        self._spans = Spans(nvtx=False)
        self._running = ExitStack()
        self._profiler: profile | None = None

    def takes(self, number: int) -> bool:
        return self._steps.start - 1 <= number < self._steps.stop

    def are_over(self, number: int) -> bool:
        """True once these steps have passed, even if profiling failed, so that ranks agree."""
        return number >= self._steps.stop

    def range(self, name: str) -> AbstractContextManager[object]:
        return self._spans(name)

    @contextmanager
    def around_step(self, number: int, device: Device) -> Iterator[None]:
        if number == self._steps.start - 1 and self._path and not self._profiler:
            self._start(device)
        with self._spans("warmup step" if number < self._steps.start else "step"):
            yield
        if self._profiler is None or self._path is None or number != self._steps.stop - 1:
            return
        device.synchronize()
        try:
            self._running.close()
            self._profiler.export_chrome_trace(str(self._path))
            self.trace, self._profiler = self._path, None
        except Exception as error:  # such as a full disk; training continues
            self._give_up(failure_of(error, None).message)

    def end(self, num_steps: int) -> None:
        if self._path is None or self.trace:
            return
        with suppress(Exception):  # the trace is not kept
            self._running.close()
        last = self._steps.stop - 1
        self._give_up(f"the loop ended after {counted(num_steps, 'step')}, before the last to profile, {last}")

    def _start(self, device: Device) -> None:
        device.synchronize()
        profiler = profile(activities=activities_on(device.torch_device), record_shapes=True)
        try:
            with ExitStack() as started:
                started.enter_context(profiler)
                left_out = started.enter_context(self._spans.on(self._module))
                self._running = started.pop_all()
        except Exception as error:  # such as another active profiler; training continues
            self._give_up(failure_of(error, None).message)
        else:
            self._profiler = profiler
            self.notes += note_on_left_out(left_out)

    def _give_up(self, why: str) -> None:
        self._profiler = self._path = None
        self.notes.append(f"profile: {why}")


def _can_be_profiled(steps: object) -> bool:
    return isinstance(steps, range) and bool(steps) and steps.step == 1 and 1 <= steps.start < steps.stop < LARGEST


Span = tuple[Any, Any]


@dataclass(slots=True)
class _Step:
    number: int
    """Number from 0, without steps that raised."""
    start: Any
    end: Any = None
    parts: dict[str, list[Span]] = field(default_factory=dict)


class Recorder:
    """Collects marks on the device's timeline, two per step and phase, and converts them to seconds after the loop.
    Each rank has one.
    """

    def __init__(
        self,
        name: str,
        *,
        tokens_per_step: int | None,
        warmup: int,
        steps: int | None,
        device: str,
        profile: range | None,
        model: nn.Module | None,
        folder: Path,
    ) -> None:
        """In a process group every rank calls this, and `finish` if its loop succeeds. `folder` is for the profile's
        trace. Raises UserError under torchrun without a process group.
        """
        self.run: Run | None = None
        self._name, self._tokens_per_step = name, tokens_per_step
        self._warmup, self._most = warmup, None if steps is None else warmup + steps
        self._ranks = _ranks()
        self._device = _open(device)
        trace = folder / "steps.json" if self.is_first else None
        self._profiled = ProfiledSteps(profile, model, trace)
        self._environment = read_environment(self._device.torch_device)
        self._number = 0
        self._steps: list[_Step] = []
        self._inside = False
        self._timed: _Step | None = None
        self._device.reset_peak()

    @property
    def is_first(self) -> bool:
        return self._ranks is None or self._ranks.rank == 0

    @property
    def num_ranks(self) -> int:
        return self._ranks.size if self._ranks else 1

    @property
    def is_complete(self) -> bool:
        return self._has_all_steps and self._profiled.are_over(self._number)

    @property
    def trace(self) -> Path | None:
        return self._profiled.trace

    @property
    def _has_all_steps(self) -> bool:
        return self._most is not None and len(self._steps) == self._most

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step; a step that raises is not counted."""
        if self._inside:
            raise UserError("rec.step() inside another step; close the first one before the next begins")
        watched = self._profiled.takes(self._number)
        self._inside = True
        try:
            with self._profiled.around_step(self._number, self._device) if watched else nullcontext():
                if not watched and not self._has_all_steps:
                    self._timed = _Step(self._number, self._device.mark())
                yield
                if self._timed:
                    self._timed.end = self._device.mark()
                    self._steps.append(self._timed)
        finally:
            ended, self._timed, self._inside = self._timed, None, False
        self._number += 1
        if ended and len(self._steps) == self._warmup:
            self._device.reset_peak()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times of a name in a step are summed. No name raises an error: control characters are written out, long
        names cut, and `step` becomes `step (phase)`.
        """
        name = _phase_name(name)
        if not self._inside:
            raise UserError(f"rec.phase('{name}') outside a step; open it inside `with rec.step():`")
        with self._profiled.range(name):
            start = self._device.mark() if self._timed else None
            yield
            if self._timed:
                self._timed.parts.setdefault(name, []).append((start, self._device.mark()))

    def finish(self, error: BaseException | None = None) -> Run:
        """End the recording. With `error`, the record is a failure; else all ranks meet here."""
        self._device.synchronize()
        self._profiled.end(self._number)
        measured = self._steps[self._warmup :]
        peak = self._device.peak("step")
        memory = Memory(
            peaks=(peak,) if peak else (),
            total_bytes=self._environment.device.memory_bytes,
            host_peak_bytes=host_peak_bytes(),
        )
        notes: list[str] = []
        if not measured:
            ran = counted(len(self._steps), "step")
            reason = f"but {self._warmup} are warm-up" if self._steps else "as none was in a `with rec.step():`"
            notes.append(f"step time: the loop ran {ran}, {reason}")
        if peak is None:
            notes.append("peak device memory: torch keeps no high-water mark on this device")
        notes += self._profiled.notes
        ranks, why = self._gathered(measured, memory, error)
        return Run(
            **new_head(),
            name=self._name,
            tokens_per_step=self._tokens_per_step,
            environment=read_clocks(self._environment, self._device.torch_device),
            timing=Timing(
                warmup=self._samples(self._steps[: self._warmup]),
                back_to_back=self._samples(measured),
                between_s=self._between(measured),
            ),
            memory=memory,
            ranks=ranks,
            failure=self._failure(error) if error else None,
            notes=(*notes, *why),
        )

    def _gathered(
        self, measured: Sequence[_Step], memory: Memory, error: BaseException | None
    ) -> tuple[tuple[RankSamples, ...], tuple[str, ...]]:
        if self._ranks is None:
            return (), ()
        if error is not None:
            return (), ("ranks: this is the first rank alone, because the loop failed",)
        if not dist.is_initialized():
            why = "the process group was destroyed before the recorder ended"
            return (), (f"ranks: this is the first rank alone, because {why}",)
        counts = self._ranks.host_gather(len(measured))
        fewest = min(counts)
        own = samples_of_rank(self._ranks.rank, self._environment, self._samples(measured[:fewest]), memory)
        gathered = tuple(self._ranks.host_gather(own))
        if fewest == max(counts):
            return gathered, ()
        return gathered, (f"ranks: compared over {counted(fewest, 'step')}, because that is how many one rank ran",)

    def _failure(self, error: BaseException) -> Failure:
        refused = refused_memory(error, "the loop", self._device) if isinstance(error, Exception) else None
        return refused or failure_of(error, None)

    def _between(self, steps: Sequence[_Step]) -> tuple[float, ...] | None:
        neighbours = [(one.end, two.start) for one, two in pairwise(steps) if two.number == one.number + 1]
        return tuple(self._device.seconds_between(end, start) for end, start in neighbours) or None

    def _samples(self, steps: Sequence[_Step]) -> tuple[PhaseSamples, ...]:
        marks = [{**step.parts, "step": [(step.start, step.end)]} for step in steps]
        names = dict.fromkeys(name for parts in marks for name in parts)
        columns = {
            name: tuple(
                sum(self._device.seconds_between(start, end) for start, end in parts[name])
                for parts in marks
                if name in parts
            )
            for name in names
        }
        return tuple(samples_by(self._device, name, seconds) for name, seconds in columns.items())


def _phase_name(given: object) -> str:
    name: str = cleaned(text_of(given))[:LONGEST_NAME]
    return f"{name} (phase)" if name in ("", "step") else name


def _open(device: str) -> Device:
    """Open the device; `auto` and `cuda` mean the current GPU, which the loop chose."""
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{torch.cuda.current_device()}"
    return open_device(device)


def _ranks() -> GroupCollectives | None:
    if dist.is_available() and dist.is_initialized():
        return GroupCollectives() if dist.get_world_size() > 1 else None
    around = torchrun_around()
    if around is not None:
        raise UserError(
            f"torchrun started {around.size} processes, which are in no process group yet; open the recorder after "
            "torch.distributed.init_process_group, and close it before destroy_process_group"
        )
    return None
