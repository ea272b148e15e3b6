"""Measures a cell in child processes, and turns their ends into a record.

A child (`processes.child`) leads its own session, so Ctrl-C reaches only the parent, which ends the child and
everything it started.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from steplab.errors import SteplabError, Unsupported, UserError
from steplab.measurement.jobs import JOBS, AuditTask, StepTask
from steplab.measurement.machine.torchrun import torchrun_around
from steplab.measurement.processes.conversation import HERE, Conversation, Listener, Surroundings
from steplab.measurement.processes.rank import Rank
from steplab.measurement.processes.wire import Request
from steplab.measurement.progress import OnProgress
from steplab.records.ceilings import Ceilings
from steplab.records.codec import encode, new_head
from steplab.records.environment import Environment
from steplab.records.failure import Failure
from steplab.records.numerics import Numerics
from steplab.records.run import Run
from steplab.specs.model import refuse_planning_only
from steplab.specs.step import StepSpec
from steplab.units import MIB, format_bytes

_PROCESS_BYTES = 128 * MIB
"""Memory of a process with only torch loaded."""


def measure_in_child(
    task: StepTask,
    *,
    surroundings: Surroundings = HERE,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Run:
    """Measure one cell in a new process; the record may be a failure, or have a note if further steps failed.

    Raises UserError (or the child's SteplabError) for an impossible request. KeyboardInterrupt ends the child and
    passes on.
    """
    spec = task.spec
    refuse_planning_only(spec.model)
    if max(spec.layout.pp, spec.layout.tp) > 1 and spec.model.shape is None:
        why = "only steplab's own Transformer is split along tp and pp; other models can be planned so"
        raise Unsupported(f"layout {spec.layout} for {spec.model.name}", why, f"use fsdp={spec.layout.world_size}")
    answer = ask(
        "step",
        task,
        device=task.spec.device,
        processes=task.spec.layout.world_size,
        timeout_s=timeout_s,
        on_progress=on_progress,
        surroundings=surroundings,
    )
    if isinstance(answer.result, Run):
        return answer.result
    assert isinstance(answer.result, Failure)
    if answer.measured is not None:
        note = f"{'memory' if task.snapshot else 'profile'}: {answer.result.message}"
        return dataclasses.replace(answer.measured, notes=(*answer.measured.notes, note))
    return Run(**new_head(), spec=task.spec, environment=answer.environment, failure=answer.result)


def ceilings_in_child(
    device: str, *, timeout_s: float | None = None, on_progress: OnProgress = lambda progress: None
) -> Ceilings:
    answer = ask("ceilings", device, timeout_s=timeout_s, on_progress=on_progress)
    ceilings: Ceilings = answer.unless_failed(f"the ceilings of device {device} could not be measured")
    return ceilings


def numerics_in_child(
    spec: StepSpec | None = None,
    *,
    device: str = "auto",
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Numerics:
    """Audit a step's precision, or without one run the accumulation study; the result may be a failure.

    Raises UserError (or the child's SteplabError) for an impossible request.
    """
    answer = ask("audit", AuditTask(spec=spec, device=device), timeout_s=timeout_s, on_progress=on_progress)
    if isinstance(answer.result, Numerics):
        return answer.result
    assert isinstance(answer.result, Failure)
    return Numerics(**new_head(), spec=spec, environment=answer.environment, failure=answer.result)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    result: Any
    environment: Environment | None
    measured: Run | None

    def unless_failed(self, what: str) -> Any:
        """Raises SteplabError, beginning with `what`, if the job failed."""
        if isinstance(self.result, Failure):
            raise SteplabError(f"{what}: {self.result.message}")
        return self.result


def ask(
    job: str,
    task: object,
    *,
    device: str = "auto",
    processes: int = 1,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    surroundings: Surroundings = HERE,
) -> Answer:
    """Have a process do a job with one result. Raises a process's SteplabError."""
    listener = Listener(JOBS[job], on_progress)
    request = Request(job=job, task=msgspec.Raw(encode(task)), device=device, processes=processes)
    failure = converse(request, listener, timeout_s, surroundings)
    result = failure or listener.result
    if result is None:  # it waits for a turn, which this job does not have
        result = Failure(kind="error", message="the process gave no result", phase=listener.progress.stage)
    return Answer(result=result, environment=listener.environment, measured=listener.measured)


def converse(
    request: Request,
    listener: Listener,
    timeout_s: float | None,
    surroundings: Surroundings = HERE,
) -> Failure | None:
    """Have a request served; returns the failure, None if the last message came.

    Under torchrun this process is one of several. Raises a process's SteplabError, and UserError if the processes do
    not fit into memory, or if torchrun started another number. KeyboardInterrupt ends them and passes on.
    """
    around = torchrun_around() if request.processes > 1 else None
    if around is not None:
        if around.size != request.processes:
            raise UserError(
                f"torchrun started {around.size} processes, but the layout takes "
                f"{request.processes}: give it --nproc-per-node and --nnodes for {request.processes} in all"
            )
        return Rank(request, listener, timeout_s, around).serve()
    if request.processes > 1:
        refuse_too_many(request.processes)
    with Conversation(request, listener, timeout_s, surroundings=surroundings) as conversation:
        return conversation.listen()


def refuse_too_many(processes: int) -> None:
    """Raise UserError without memory for the processes with only torch loaded: a swapping machine needs minutes to
    fail.
    """
    available = psutil.virtual_memory().available
    if processes * _PROCESS_BYTES > available:
        raise UserError(
            f"{processes} processes do not fit: each takes at least {format_bytes(_PROCESS_BYTES)}, and "
            f"{format_bytes(available)} of memory are free; start at most {available // _PROCESS_BYTES}"
        )
