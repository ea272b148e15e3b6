"""A measuring process: it receives a request over its wire, and sends messages, the result last.

`processes.conversation` starts it with the arguments FD [JOB]; FD is its end of the wire. It ends once the wire is
closed, however its parent died. With a job it first imports the job's modules, and sends `ready`.
"""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from steplab.errors import ERRORS, own_error
from steplab.measurement.jobs import JOBS
from steplab.measurement.machine.torchrun import ProcessPlace, place_in
from steplab.measurement.observer import Observer
from steplab.measurement.processes.wire import BadMessage, Request, Whereabouts, Wire, decoded
from steplab.records.timing import Turn

Send = Callable[[Any, Any], None]
_STEP_MESSAGES_EVERY_S = 0.1
_OF_EVERY_RANK = ("stage", "step", "failed", "refused", "ended")
_ENDED_FROM_OUTSIDE_S = 20.0
"""Seconds that a failed process waits to be killed: its exit would hide the cause from other ranks."""
_FOLDER_KEPT_S = 0.25
"""Seconds that the meeting folder outlasts the parent: without it, a rank that opens its store there blocks for
minutes.
"""


def main() -> None:
    remove_what_was_cut_off(keep_compiled_code_private())
    wire, given = Wire(Connection(int(sys.argv[1]))), SimpleQueue[Any]()
    folder: str | None = None

    def receive_all() -> None:
        try:
            while message := wire.receive():
                if message.kind == "where":
                    wire.send("where", whereabouts(threading.main_thread()))
                elif message.kind in _GIVEN:
                    given.put(decoded(message.value, _GIVEN[message.kind]))
            why = "the connection to the first process ended"
        except BadMessage as error:
            why = f"the first process sent an unreadable message: {error}"
        print(f"steplab: {why}", file=sys.stderr, flush=True)
        if folder is not None:
            time.sleep(_FOLDER_KEPT_S)
            shutil.rmtree(folder, ignore_errors=True)  # the parent may have been killed
        os.killpg(0, signal.SIGKILL)  # the whole session: processes that the model started end as well

    def next_turn() -> Turn:
        wire.send("ready")
        turn: Turn = given.get()
        return turn

    threading.Thread(target=receive_all, daemon=True).start()
    for job in sys.argv[2:]:
        JOBS[job].load()
        wire.send("ready")
    request: Request = given.get()
    folder = request.folder
    place = place_in() if request.processes > 1 else None

    def send(kind: Any, value: Any) -> None:
        if place is None or place.is_first or kind in _OF_EVERY_RANK:
            wire.send(kind, value)

    def meet() -> Any:
        from steplab.measurement.machine.world import private_meeting_place

        assert folder is not None
        assert place is not None
        return private_meeting_place(folder, place.size)

    if not work(request, send, place, meet, next_turn):
        time.sleep(_ENDED_FROM_OUTSIDE_S)
        sys.exit(1)


_GIVEN = {"request": Request, "turn": Turn}


def work(
    request: Request,
    send: Send,
    place: ProcessPlace | None = None,
    meet: Callable[[], Any] = lambda: None,
    next_turn: Callable[[], Turn | None] = lambda: None,
) -> bool:
    """Do the job; send progress and, last, result or failure; returns True for success. `meet` returns the common
    store.
    """
    from steplab.measurement import compat
    from steplab.measurement.clock import lengthen_launch_queues
    from steplab.measurement.machine.failures import failure_from
    from steplab.measurement.machine.world import join_world

    if JOBS[request.job].holds_device:
        lengthen_launch_queues()
    stage, world = "starting", None

    def begin(name: str, num_steps: int) -> None:
        nonlocal stage
        stage = name
        send("stage", [name, num_steps])

    try:
        if place is not None:
            begin("joining", 0)
            world = join_world(place, request.device, meet, folder=request.folder)
        compat.watch_refused_allocations()
        result = JOBS[request.job].do(request.task, _observer(send, begin, next_turn), world)
        failure = getattr(result, "failure", None)
        if world is None or failure is None:
            send("result", result)
        else:  # of one rank, and so of all
            send("failed", failure)
            return False
        if world is not None:
            send("ended", None)
            world.leave()
    except ERRORS as error:
        send("refused", [own_error(error).exit_code, str(error)])
        return False
    except (Exception, SystemExit) as error:
        send("failed", failure_from(error, stage, world.device if world else None))
        return False
    return True


def _observer(send: Send, on_stage: Callable[[str, int], None], next_turn: Callable[[], Turn | None]) -> Observer:
    last_sent_s = 0.0

    def on_step(iteration: int) -> None:
        nonlocal last_sent_s
        now_s = time.monotonic()
        if now_s - last_sent_s >= _STEP_MESSAGES_EVERY_S:
            last_sent_s = now_s
            send("step", iteration + 1)

    return Observer(
        on_environment=lambda environment: send("environment", environment),
        on_stage=on_stage,
        on_step=on_step,
        on_measured=lambda run: send("measured", run),
        on_facts=lambda facts: send("facts", facts),
        on_under_way=lambda cells: send("at", cells),
        on_cell=lambda number, cell: send("cell", [number, cell]),
        next_turn=next_turn,
    )


def whereabouts(thread: threading.Thread) -> Whereabouts:
    frame = sys._current_frames().get(thread.ident) if thread.ident is not None else None
    state: str | None = None
    while frame is not None:
        path = frame.f_code.co_filename.replace(os.sep, "/")
        state = state or _state(path, frame.f_code.co_name)
        if _is_told(path):
            return Whereabouts(state=state or "code", line=_place(frame))
        frame = frame.f_back
    return Whereabouts(state=state or "code", line="a line that is not known")


def _state(path: str, function: str) -> str | None:
    if "/torch/distributed/" in path or "/steplab/parallel/" in path:
        return "collective"
    if "/torch/" in path and function == "synchronize":
        return "device"
    return "code" if _is_told(path) else None


def _is_told(path: str) -> bool:
    libraries = ("<", os.path.dirname(os.__file__) + "/")
    return not path.startswith(libraries) and "/torch/" not in path and "/steplab/parallel/" not in path


def _place(frame: FrameType) -> str:
    path = "/".join(frame.f_code.co_filename.split(os.sep)[-2:])
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"


_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_LINKED_WITHIN_S = 10.0


def keep_compiled_code_private(environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """Have torch.compile keep its code in the user's cache folder, unless its variable names another. Returns the
    folder; None without a home folder.

    Anyone may make the default, /tmp/torchinductor_USER, first, and torch runs its contents.
    """
    if _VARIABLE not in environment:
        cache = Path(environment.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():
            try:
                cache = Path.home() / ".cache"
            except RuntimeError:
                return None
        environment[_VARIABLE] = str(cache / "steplab" / "torchinductor")
    folder = environment[_VARIABLE]
    return Path(folder) if folder else None  # an empty name would be the working folder


def remove_what_was_cut_off(folder: Path | None) -> None:
    """Remove empty libraries: a killed linker leaves them, and torch would fail to load them in every later step."""
    for library in folder.glob("*/*.so") if folder else ():
        try:
            found = library.stat()
            if not found.st_size and time.time() - found.st_mtime > _LINKED_WITHIN_S:
                library.unlink()
        except OSError:
            continue  # another process was quicker, or it is another user's
