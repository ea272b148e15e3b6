"""Progress on stderr: one live line at a terminal; elsewhere a line per stage, per cell, or every ten seconds."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from steplab.cli.options import MeasurementOptions, StoreOptions
from steplab.cli.output import say
from steplab.measurement.progress import Progress
from steplab.printing import plain
from steplab.records.record import Benchmark
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.specs.step import StepSpec
from steplab.units import counted, counted_results, format_bytes, format_clock, format_time, parse_duration

if TYPE_CHECKING:
    from steplab.lab.benchmark import Measuring
    from steplab.lab.sweeping import SweepProgress

_LONG_S = 10.0
"""Seconds after which a long stage reports again, and from which the time left is shown."""
_SHORT_S = 2.0

_STAGES = {
    "starting": "starting a process",
    "joining": "joining the other processes",
    "build": "building the model",
    "compile": "compiling",
    "warmup": "warming up",
    "measure": "measuring",
    "phases": "measuring each phase alone",
    "profile": "profiling",
    "trace": "writing the trace",
    "memory": "recording the memory of a step",
    "snapshot": "writing the snapshot",
    "read": "reading the trace",
    "dry run": "predicting what compiling would save",
    "traces": "reading the traces",
    "read snapshot": "reading the snapshot",
    "sums": "adding up",
    "reference": "running the step in fp32",
    "audit": "auditing the step",
    "histories": "recording largest magnitudes",
    "scaling": "trying a loss scale",
    "predict": "predicting",
    "draw": "drawing the page",
    "check": "reading the whole store",
}


def _is_live() -> bool:
    return sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def _words(progress: Progress) -> str:
    stage = _STAGES.get(progress.stage, progress.stage)
    if progress.stage.startswith("read") and progress.total:
        return f"{stage}, {format_bytes(progress.done)} of {format_bytes(progress.total)}"
    noun = "run" if progress.stage == "predict" else "step"
    return f"{stage}, {noun} {progress.done} of {progress.total}" if progress.total and progress.done else stage


@contextmanager
def shown(stage: str) -> Iterator[None]:
    with ProgressLine() as line:
        progress = Progress(stage=stage, done=0, total=0)
        telling = threading.Timer(0 if _is_live() else _SHORT_S, line.within, [progress])
        telling.daemon = True
        telling.start()
        try:
            yield
        finally:
            telling.cancel()
            telling.join()  # it may be writing


@contextmanager
def measuring_step(spec: StepSpec, measured: MeasurementOptions, out: StoreOptions) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments for a measurement, and show its progress. Raises UserError for an invalid timeout."""
    with ProgressLine(num_steps=spec.warmup + spec.steps) as line:
        how = {"name": measured.name, "store": out.store, "timeout_s": measured.timeout_s()}
        yield {**how, "on_progress": line.within}


def say_failed(record: Run) -> None:
    if record.failure:
        say(f"steplab: {record.status.replace('_', ' ')}: {record.failure.message}")


@contextmanager
def measuring(
    num_cells: int, line_of: Callable[[Any], str], name: str, timeout: str, out: StoreOptions
) -> Iterator["Measuring"]:
    """Yield keyword arguments for measuring a benchmark; each cell prints `line_of` it when it ends.

    Raises UserError for an invalid timeout.
    """
    with ProgressLine() as line:
        yield {
            "name": name,
            "store": out.store,
            "timeout_s": parse_duration(timeout),
            "on_progress": line.alive,
            "on_cell": lambda number, cell: line.done(number + 1, num_cells, line_of(cell)),
        }


class ProgressLine:
    """Shows stage, progress, time elapsed and, in a sweep, time left."""

    def __init__(self, *, num_steps: int = 0, resume: bool = False) -> None:
        """`num_steps`: warm-up and measured steps, to estimate the time left. `resume`: the sweep continues a stored
        study."""
        self._num_steps, self._resume = num_steps, resume

    def __enter__(self) -> Self:
        self._started_s = self._stage_began_s = time.monotonic()
        self._stage, self._told_s = "", 0.0
        self._bar: Any = None
        self._task: Any = None
        if _is_live():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[counted]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None, counted="", left="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def within(self, progress: Progress) -> None:
        self._foretell(progress)
        if self._bar:
            total = progress.total or None
            self._bar.update(self._task, description=plain(_words(progress)), total=total, completed=progress.done)
            return
        now_s = time.monotonic()
        if progress.stage != self._stage and progress.stage != "starting":
            say(f"{_STAGES.get(progress.stage, progress.stage)} …")
        elif progress.done and now_s - self._told_s >= _LONG_S:
            say(f"{_words(progress)}  ({format_clock(now_s - self._started_s)} elapsed)")
        else:
            return
        self._stage, self._told_s = progress.stage, now_s

    def _foretell(self, progress: Progress) -> None:
        """After the first step, estimate the remaining time, unless it is short.

        A GPU step counts as over once Python has launched it. An estimate from launches alone is too short to be shown.
        """
        if progress.done == 0:
            self._stage_began_s = time.monotonic()
        elif progress.stage in ("warmup", "measure") and progress.done == 1 and self._num_steps > 1:
            step_s = time.monotonic() - self._stage_began_s
            left_s, self._num_steps = step_s * (self._num_steps - 1), 0
            if left_s >= _LONG_S:
                others = counted(round(left_s / step_s), "more step")
                self._line(f"the first step took {format_time(step_s)}; {others} take about {format_clock(left_s)}")

    def _line(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(plain(text), markup=False, highlight=False)
        else:
            say(text)

    def alive(self, progress: Progress) -> None:
        if self._bar:
            self.within(progress)

    def done(self, number: int, total: int, text: str, left: str = "") -> None:
        elapsed = "" if self._bar else f"  ({format_clock(time.monotonic() - self._started_s)} elapsed{left})"
        self._line(f"[{number}/{total}] {text}{elapsed}")

    def sweep(self, progress: "SweepProgress") -> None:
        if self._resume and not self._stage:
            self._stage = "resumed"
            made = f"{counted(progress.skipped, 'measurement')} already made"
            none = "nothing to resume: the store has no finished measurement of this study"
            say(f"{made if progress.skipped else none}, {progress.to_run} to go")
        ended = bool(progress.record or progress.refusal)
        number = progress.index + ended
        if progress.within:
            if progress.within.stage == "starting":
                self._num_steps = progress.num_steps
            self._foretell(progress.within)
        if self._bar and progress.within:
            self._bar.update(
                self._task,
                description=plain(f"{progress.what}: {_words(progress.within)}"),
                total=progress.to_run,
                completed=number,
                counted=f"{progress.index + 1}/{progress.to_run}",
                left=self._left(progress),
            )
        if ended:
            left = self._left(progress, ", ")
            self.done(number, progress.to_run, f"{progress.what}: {_result(progress)}", left)

    def _left(self, progress: "SweepProgress", before: str = "") -> str:
        done = progress.index + bool(progress.record or progress.refusal)
        if not done or done == progress.to_run:
            return ""
        per_cell_s = (time.monotonic() - self._started_s) / done
        return f"{before}about {format_clock(per_cell_s * (progress.to_run - done))} left"


def _result(progress: "SweepProgress") -> str:
    record = progress.record
    if record is None:
        return f"not measured: {progress.refusal}"
    step_s = run_row(record)["step_time_s"] if isinstance(record, Run) else None
    if isinstance(step_s, float):
        return f"{format_time(step_s)} per step"
    if isinstance(record, Benchmark):
        return counted_results(len(record.cells), "cell", sum(cell.failure is not None for cell in record.cells))
    return record.status.replace("_", " ")
