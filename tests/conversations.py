from collections.abc import Callable
from typing import Any

import msgspec

from steplab.measurement.jobs import JOBS, CellsTask
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import Request
from steplab.records.codec import encode
from steplab.records.failure import Failure

Converse = Callable[[Request, Listener, float | None], Failure | None]


def say(listener: Listener, kind: str, value: object = None) -> None:
    listener.hear(kind, msgspec.Raw(encode(value)))


def task_of(request: Request) -> CellsTask[Any]:
    return msgspec.json.decode(request.task, type=JOBS[request.job].task)
