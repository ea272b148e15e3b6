"""Measure a cell in a process of its own, and turn whatever happens to that process into a record.

The child (`entry.child`) gets the spec on standard input and answers over a pipe. It leads a session of its own, so
that Ctrl-C reaches the parent alone, which then ends the child with everything the child started.
"""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from steplab import __version__
from steplab.errors import SteplabError
from steplab.measurement.jobs import JOBS, AuditTask, StepTask
from steplab.measurement.machine.torchrun import Torchrun, torchrun_around
from steplab.measurement.processes.channel import connect
from steplab.measurement.processes.hub import command_line_of
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import Order, Request
from steplab.measurement.processes.ranks_launch import converse_with_ranks, environment_of
from steplab.measurement.processes.started import Watchdog, crash, end, end_group_with, named, tail
from steplab.measurement.progress import OnProgress
from steplab.records.attention_tuning import AttentionTuning
from steplab.records.ceilings import Ceilings
from steplab.records.codec import encode, new_id, now_utc
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.specs.attention_tuning import TuningStudy
from steplab.specs.model import refuse_planning_only
from steplab.specs.step import StepSpec
from steplab.units import format_time

_EXIT_S = 10.0
"""How long a child may take to exit after its answer."""
_FIRST_RANK_S = 30.0
"""How much longer than the first command line, which knows of all ranks, another one of torchrun's waits."""
_WRAPPER_EXIT_S = 600.0
"""How long the profiler around a child may take to write what it recorded."""


def measure_in_child(
    spec: StepSpec,
    *,
    profiled_steps: int = 0,
    trace: Path | None = None,
    snapshot: Path | None = None,
    marks: Path | None = None,
    wrapper: Sequence[str] = (),
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Run:
    """Measure one cell in a new process and give its record, which may be a failure.

    profiled_steps > 0: after all timing so many steps are recorded, by torch.profiler to the file `trace`, or without
    one by the profiler whose command `wrapper` is. With `snapshot` and `marks`, the memory of one step is written there
    (measurement.memory.recorder). Where that fails, the record has a note and the files are missing.

    Raises UserError (or the SteplabError the child named) for a request that cannot be served: that is no
    measurement. KeyboardInterrupt ends the child and passes on.
    """
    refuse_planning_only(spec.model)  # here already: torch takes seconds to load
    task = StepTask(
        spec=spec,
        profiled_steps=profiled_steps,
        trace=str(trace) if trace else None,
        snapshot=str(snapshot) if snapshot else None,
        marks=str(marks) if marks else None,
    )
    answer = ask(
        "step",
        task,
        device=spec.device,
        processes=spec.layout.world_size,
        timeout_s=timeout_s,
        on_progress=on_progress,
        wrapper=wrapper,
    )
    if isinstance(answer.result, Run):
        return answer.result
    assert isinstance(answer.result, Failure)
    if answer.measured is not None:
        note = f"{'memory' if snapshot else 'profile'}: {answer.result.message}"
        return dataclasses.replace(answer.measured, notes=(*answer.measured.notes, note))
    return Run(
        id=new_id(),
        created_utc=now_utc(),
        steplab_version=__version__,
        spec=spec,
        environment=answer.environment,
        failure=answer.result,
    )


def ceilings_in_child(
    device: str, *, timeout_s: float | None = None, on_progress: OnProgress = lambda progress: None
) -> Ceilings:
    """Measure a device's ceilings in a new process. Raises SteplabError where it does not come to an end."""
    result = ask("ceilings", device, timeout_s=timeout_s, on_progress=on_progress).result
    if isinstance(result, Ceilings):
        return result
    assert isinstance(result, Failure)
    raise SteplabError(f"the ceilings of device {device} could not be measured: {result.message}")


def numerics_in_child(
    spec: StepSpec | None = None,
    *,
    device: str = "auto",
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Numerics:
    """Audit a step's precision in a new process, or without a step make sums on a device; it may be a failure.

    Raises UserError (or the SteplabError the child named) for a request that cannot be served.
    """
    answer = ask("audit", AuditTask(spec=spec, device=device), timeout_s=timeout_s, on_progress=on_progress)
    if isinstance(answer.result, Numerics):
        return answer.result
    assert isinstance(answer.result, Failure)
    return Numerics(
        id=new_id(),
        created_utc=now_utc(),
        steplab_version=__version__,
        spec=spec,
        environment=answer.environment,
        failure=answer.result,
    )


def tuning_in_child(study: TuningStudy, on_progress: OnProgress = lambda progress: None) -> AttentionTuning:
    """Measure candidates for the tiles of flash_triton in a new process, which has others under it.

    Raises UserError where there is no GPU for it, SteplabError where the process dies.
    """
    result = ask("tuning", study, on_progress=on_progress).result
    if isinstance(result, AttentionTuning):
        return result
    assert isinstance(result, Failure)
    raise SteplabError(f"attention could not be tuned: {result.message}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of a job."""

    result: Any
    """The result, of the job's own type; or a Failure."""
    environment: Environment | None
    """Where it ran; None if no process could say."""
    measured: Run | None
    """The record as it was when watching began."""


def ask(
    job: str,
    task: object,
    *,
    device: str = "auto",
    processes: int = 1,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    wrapper: Sequence[str] = (),
) -> Answer:
    """Have a job done that has one result. Raises the SteplabError that a process named."""
    listener = Listener(JOBS[job], on_progress)
    request = Request(job=job, task=msgspec.Raw(encode(task)), device=device, processes=processes)
    failure = converse(request, listener, timeout_s, wrapper)
    result = failure or listener.result
    assert result is not None  # a child that said nothing has failed
    return Answer(result=result, environment=listener.environment, measured=listener.measured)


def converse(
    request: Request, listener: Listener, timeout_s: float | None, wrapper: Sequence[str] = ()
) -> Failure | None:
    """Start a child, have `listener` hear it out, and give what became of it; None: it said its last word.

    A request for several processes is given to so many, started here or by torchrun (ranks_launch).

    Raises the SteplabError that the child named. KeyboardInterrupt ends the child and passes on.
    """
    if request.processes == 1:
        return _converse_with_child("steplab.measurement.entry.child", request, listener, timeout_s, wrapper)
    around = torchrun_around()
    if around is None or around.is_first:
        return converse_with_ranks(request, listener, timeout_s, around)
    return _follow_the_first(request, listener, timeout_s, around)


def _follow_the_first(
    request: Request, listener: Listener, timeout_s: float | None, around: Torchrun
) -> Failure | None:
    """What the command line of a rank but the first does: its child hears from the first what became of all."""
    patience_s = None if timeout_s is None else timeout_s + _FIRST_RANK_S
    order, variables = Order(request=request), environment_of(around)
    failure = _converse_with_child("steplab.measurement.entry.rank", order, listener, patience_s, environment=variables)
    if failure is None:
        return listener.failed
    if listener.hub is not None:
        with contextlib.suppress(OSError):  # the first has ended; torchrun says so
            connect(*listener.hub, command_line_of(around.rank)).send("failed", failure)
    return named(failure, around.rank, socket.gethostname())


def _converse_with_child(
    module: str,
    order: Request | Order,
    listener: Listener,
    timeout_s: float | None,
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Failure | None:
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as errors, os.fdopen(read_fd, "rb") as pipe:
        child = subprocess.Popen(
            [*wrapper, sys.executable, "-m", module, str(write_fd)],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            env=environment,
            pass_fds=[write_fd],
            start_new_session=True,
        )
        os.close(write_fd)
        watchdog = Watchdog(child, timeout_s)
        threading.Thread(target=end_group_with, args=(child,), daemon=True).start()
        listener.renew = watchdog.renew
        try:
            assert child.stdin is not None
            # A child that dies at once leaves nobody to read: its exit is what gets reported.
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(encode(order) + b"\n")
                child.stdin.flush()
            listener.listen(pipe)
            # With its answer in hand, a child that does not get out of the door is no longer waited for.
            exit_s = _WRAPPER_EXIT_S if wrapper else _EXIT_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=exit_s if listener.answered else None)
        finally:
            watchdog.cancel()
            end(child)
        return _failure(listener, child.returncode, watchdog, errors)


def _failure(listener: Listener, returncode: int, watchdog: Watchdog, errors: IO[bytes]) -> Failure | None:
    """What became of a child without a last word; raises its refusal."""
    if listener.refusal is not None:
        raise listener.refusal
    if listener.answered:
        return None
    stage = listener.progress.stage
    if watchdog.fired:
        assert watchdog.timeout_s is not None
        message = f"did not end within {format_time(watchdog.timeout_s)}"
        return Failure(kind="timeout", message=message, phase=stage, last_lines=tail(errors))
    return crash(returncode, stage, tail(errors))
