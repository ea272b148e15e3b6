"""Parts of a conversation between a parent and the processes that measure for it, for tests that play the processes."""

from collections.abc import Callable
from typing import Any

import msgspec

from steplab.measurement.jobs import JOBS, CellsTask
from steplab.measurement.processes.conversation import Listener
from steplab.measurement.processes.wire import Message, Request
from steplab.records.codec import encode
from steplab.records.failure import Failure

Converse = Callable[[Request, Listener, float | None], Failure | None]


def say(listener: Listener, kind: Any, value: object = None) -> None:
    """A message of a process."""
    listener.receive(Message(kind=kind, value=msgspec.Raw(encode(value))))


def task_of(request: Request) -> CellsTask[Any]:
    """What the processes are asked to do."""
    return msgspec.json.decode(request.task, type=JOBS[request.job].task)
