"""Runs tasks in worker processes, of which one may hang, or die with its device, and lose only its own task.

To be used in a measuring process (`entry.child`): when its session is ended, so are the workers.
"""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from steplab.units import format_time

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Lost:
    """A task without a result."""

    why: str
    """The reason, in a few words."""


@dataclass(kw_only=True, slots=True)
class _Worker(Generic[Task]):
    process: multiprocessing.process.BaseProcess
    pipe: "Connection[tuple[int, Task], tuple[object, bool]]"
    task: int | None = None
    """The number of the present task; None while the worker waits."""
    deadline_s: float = field(default=0.0)


def in_workers(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    num_workers: int,
    timeout_s: float,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[Result | Lost]:
    """The results of `work`, a function at the top of a module, in the order of the tasks.

    A task is lost if it takes longer than `timeout_s` (in a new process, imports included), if it raises, or if its
    process does not survive it; the other tasks continue in another process. `on_done` is called with the number of
    tasks that have ended.
    """
    context = multiprocessing.get_context("spawn")
    left = deque(range(len(tasks)))
    results: dict[int, Result | Lost] = {}
    workers: list[_Worker[Task]] = []

    def end(worker: _Worker[Task]) -> None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        workers.remove(worker)

    def start() -> None:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, work), daemon=True)
        process.start()
        there.close()  # so that its end is noticed here
        workers.append(_Worker(process=process, pipe=here))

    try:
        while len(results) < len(tasks):
            while left and len(workers) < min(num_workers, len(tasks)) and all(w.task is not None for w in workers):
                start()
                _give(workers[-1], left, tasks, timeout_s)
            for worker in workers:
                if worker.task is None and left:
                    _give(worker, left, tasks, timeout_s)
            busy = [worker for worker in workers if worker.task is not None]
            first_s = min(worker.deadline_s for worker in busy)
            heard = wait([worker.pipe for worker in busy], timeout=max(0.0, first_s - time.monotonic()))
            for worker in busy:
                assert worker.task is not None
                task = worker.task
                if worker.pipe in heard:
                    results[task], goes_on = _heard(worker)
                elif time.monotonic() >= worker.deadline_s:
                    results[task], goes_on = Lost(f"did not end within {format_time(timeout_s)}"), False
                else:
                    continue
                worker.task = None
                if not goes_on:
                    end(worker)
                on_done(len(results))
        return [results[number] for number in range(len(tasks))]
    finally:
        for worker in list(workers):
            end(worker)


def _give(worker: _Worker[Task], left: deque[int], tasks: Sequence[Task], timeout_s: float) -> None:
    worker.task = left.popleft()
    worker.deadline_s = time.monotonic() + timeout_s
    worker.pipe.send((worker.task, tasks[worker.task]))


def _heard(worker: _Worker[Task]) -> tuple[Result | Lost, bool]:
    """The result, and whether the process continues."""
    try:
        return worker.pipe.recv()  # type: ignore[return-value]
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return Lost(f"its process ended with exit code {worker.process.exitcode}"), False


def _serve(pipe: "Connection[tuple[object, bool], tuple[int, Task]]", work: Callable[[Task], object]) -> None:
    """The worker process: it runs tasks until one raises, after which nothing is known of the device."""
    goes_on = True
    while goes_on:
        try:
            _, task = pipe.recv()
        except EOFError:
            return
        try:
            result = work(task)
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            result, goes_on = Lost(f"{type(error).__name__}: {first_line}"), False
        pipe.send((result, goes_on))
