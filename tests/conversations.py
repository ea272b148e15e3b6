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
    listener.receive(Message(kind=kind, value=msgspec.Raw(encode(value))))


def task_of(request: Request) -> CellsTask[Any]:
    return msgspec.json.decode(request.task, type=JOBS[request.job].task)
