"""The measuring process: one request on standard input, messages on a pipe, the result last.

`processes.launch` starts it as `python -m steplab.measurement.entry.child FD [JOB]`; with a job, before its request is
known: it loads what such a job needs, and says that it is ready. Standard input stays open for as long as
the parent lives: when it ends, however the parent died, this process ends too and frees the GPU.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from steplab.errors import SteplabError
from steplab.measurement.jobs import JOBS
from steplab.measurement.observer import Observer
from steplab.measurement.processes.messages import MOST_BYTES, BadMessage, Request, decoded, lines_of
from steplab.records.codec import encode
from steplab.records.turns import Turn

if TYPE_CHECKING:
    from steplab.measurement.machine.world import World

_STEP_MESSAGES_EVERY_S = 0.1


def main() -> None:
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)

    def send(kind: str, value: Any) -> None:
        pipe.write(encode({"kind": kind, "value": value}) + b"\n")

    for job in sys.argv[2:]:
        keep_compiled_code_private()
        JOBS[job].load()
        send("ready", None)
    request = order_of(Request)
    orders = SimpleQueue[bytes]()
    threading.Thread(target=end_with_parent, args=(orders.put,), daemon=True).start()

    def next_turn() -> Turn:
        send("ready", None)
        return cast(Turn, decoded(orders.get(), Turn))

    try:
        answer(request, send, next_turn=next_turn)
    except SteplabError as error:
        send("refused", [error.exit_code, str(error)])


def order_of(type: Any) -> Any:
    """The order on standard input. Ends the process, with a line that says why, if there is none."""
    try:
        return decoded(next(lines_of(sys.stdin.buffer), b""), type)
    except BadMessage as error:
        sys.exit(f"steplab: the order of the measuring process is unreadable: {error}")


def answer(
    request: Request,
    send: Callable[[str, Any], None],
    world: "World | None" = None,
    next_turn: Callable[[], Turn | None] = lambda: None,
) -> None:
    """Do the job, send messages about its progress and, last, the result; in a world every rank does so.

    `next_turn` gives a job that takes turns its next one.

    Raises SteplabError for a request that cannot be served.
    """
    from steplab.measurement import compat

    keep_compiled_code_private()
    last_sent_s = 0.0

    def on_step(iteration: int) -> None:
        nonlocal last_sent_s
        now_s = time.monotonic()
        if now_s - last_sent_s >= _STEP_MESSAGES_EVERY_S:
            last_sent_s = now_s
            send("step", iteration + 1)

    observer = Observer(
        on_environment=lambda environment: send("environment", environment),
        on_stage=lambda stage, num_steps: send("stage", [stage, num_steps]),
        on_step=on_step,
        on_measured=lambda run: send("measured", run),
        on_facts=lambda facts: send("facts", facts),
        on_under_way=lambda cells: send("at", cells),
        on_cell=lambda number, cell: send("cell", [number, cell]),
        next_turn=next_turn,
    )
    compat.watch_refused_allocations()
    send("result", JOBS[request.job].do(request.task, observer, world))


def end_with_parent(on_line: Callable[[bytes], None] = lambda line: None) -> None:
    """Pass on the lines of standard input, and end with it.

    It is read by its descriptor: a daemon thread must hold no lock of Python's.
    """
    rest = b""
    while received := os.read(0, 4096):
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            on_line(line)
        if len(rest) > MOST_BYTES:
            break
    os.killpg(0, signal.SIGKILL)  # the whole session: processes that the model started end as well


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code_private(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch.compile keep its code in the user's cache folder, unless its variable names another one.

    Its default is /tmp/torchinductor_USER: anyone on the machine may make that folder first, and torch then runs what
    they put there. Without a home folder the default stays.
    """
    cache = Path(environment.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return
    environment.setdefault(_VARIABLE, str(cache / "steplab" / "torchinductor"))


if __name__ == "__main__":
    main()
