"""A measuring process: an order comes over its connection, messages go back, and the result is the last of them.

`processes.conversation` starts it with the arguments FD [JOB]; FD is its connection to that process, and this one
ends when the connection does, however the other died, and frees the GPU. With a job it first loads what such a job
needs, and says that it is ready.

One of several processes belongs to the process that listens to all ranks, if steplab started it or it is torchrun's
first. Any other rank of torchrun belongs to a command line of its own. It finds the first command line through the
store where all ranks meet.
"""

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from steplab.errors import ERRORS, own_error
from steplab.measurement.entry.compiled_code import keep_compiled_code_private, remove_what_was_cut_off
from steplab.measurement.jobs import JOBS
from steplab.measurement.machine.torchrun import LOOPBACK, ProcessPlace, place_in, torchrun_around
from steplab.measurement.observer import Observer
from steplab.measurement.processes.channel import Channel, connect
from steplab.measurement.processes.messages import BadMessage, JointOutcome, Order, Request, hub_at
from steplab.measurement.processes.started import named
from steplab.records.failure import Failure
from steplab.records.turns import Turn

if TYPE_CHECKING:
    from steplab.measurement.machine.world import World

_STEP_MESSAGES_EVERY_S = 0.1
_OF_EVERY_RANK = ("stage", "step")
"""The messages that the hub hears from every rank; from the first rank it hears all."""
_VERDICT_S = 20.0
"""How long a rank that has finished waits for the verdict over all ranks."""
_FOLDER_KEPT_S = 0.25
"""How long the folder of the meeting stays once the parent is gone. A rank that just opens its store there has ended by
then; without the folder torch would wait for it for minutes, and let no other thread of the rank run."""


def main() -> None:
    remove_what_was_cut_off(keep_compiled_code_private())
    parent, orders = Channel(socket.socket(fileno=int(sys.argv[1]))), SimpleQueue[Any]()
    folder: str | None = None

    def on_end(why: str) -> None:
        print(f"steplab: {why}", file=sys.stderr, flush=True)
        if folder is not None:
            time.sleep(_FOLDER_KEPT_S)
            shutil.rmtree(folder, ignore_errors=True)  # the parent may have been killed
        os.killpg(0, signal.SIGKILL)  # the whole session: processes that the model started end as well

    parent.listen(on_end, on_order=orders.put)
    for job in sys.argv[2:]:
        JOBS[job].load()
        parent.send("ready")
    order: Order = orders.get()
    folder = order.folder

    def next_turn() -> Turn:
        parent.send("ready")
        turn: Turn = orders.get()
        return turn

    if order.request.processes == 1:
        did_work = _work(order, parent, parent.send, next_turn=next_turn)
    elif order.folder is not None or order.hub is not None:
        did_work = _work_for_parent(order, parent)
    else:
        did_work = _work_for_first(order, parent)
    if not did_work:
        time.sleep(_VERDICT_S)  # it is ended from outside once the cause is known: an exit here would hide the cause
        sys.exit(1)


def _work_for_parent(order: Order, parent: Channel) -> bool:
    """Work as a rank that the parent hears, beside all others; returns whether it succeeded."""
    place = place_in()

    def meet() -> Any:
        from steplab.measurement.machine.world import meeting_place, private_meeting_place

        if order.folder is not None:
            return private_meeting_place(order.folder, place.size)
        around = torchrun_around()
        assert around is not None
        assert order.hub is not None
        store = meeting_place(around)
        port, token = order.hub
        store.set("hub", f"{port}:{token}")
        return store

    def send(kind: str, value: Any) -> None:
        if place.is_first or kind in _OF_EVERY_RANK:
            parent.send(kind, value)

    return _work(order, parent, send, place, meet)


def _work_for_first(order: Order, parent: Channel) -> bool:
    """Work as a rank whose messages go to torchrun's first command line; the parent hears how all ranks ended."""
    from steplab.measurement.machine.world import meeting_place

    heard, around = threading.Event(), torchrun_around()
    assert around is not None
    rank = around.rank

    def on_verdict(verdict: JointOutcome) -> None:
        if verdict.failure is not None or verdict.refused is not None:
            parent.send("failed" if verdict.failure else "refused", verdict.failure or verdict.refused)
            os._exit(1)  # the main thread may wait forever in a collective
        heard.set()

    def lost(why: str) -> None:
        parent.send("failed", named(Failure(kind="crashed", message=why), rank, socket.gethostname()))

    def on_end(why: str) -> None:
        if not heard.is_set():
            lost(why)
            os._exit(1)

    try:
        store = meeting_place(around)
        port, token = hub_at(store.get("hub"))
        address = LOOPBACK if around.is_on_one_machine else around.address
        hub = connect(address, port, token, rank)
    except (OSError, RuntimeError, BadMessage) as error:  # torch's store raises RuntimeErrors
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        lost(f"it found no way to the first process: {first_line}")
        sys.exit(1)
    parent.send("hub", (address, port, token))
    hub.listen(on_end, on_verdict=on_verdict)
    said: list[tuple[str, Any]] = []

    def send(kind: str, value: Any) -> None:
        if kind in _OF_EVERY_RANK:
            hub.send(kind, value)
            parent.send(kind, value)
        else:  # the last messages of this rank count only if all ranks succeed
            said.append((kind, value))

    _work(order, hub, send, around, lambda: store)
    if not heard.wait(_VERDICT_S):
        sys.exit(1)
    for kind, value in said:
        parent.send(kind, value)
    return True


def _work(
    order: Order,
    hub: Channel,
    send: Callable[[str, Any], None],
    place: ProcessPlace | None = None,
    meet: Callable[[], Any] = lambda: None,
    next_turn: Callable[[], Turn | None] = lambda: None,
) -> bool:
    """Do the job, pass its messages to `send`, and tell the hub how it ended; returns whether it succeeded.

    `place` is that of a rank among several, and `meet` returns the store where all of them meet.
    """
    from steplab.measurement.machine.failures import failure_from
    from steplab.measurement.machine.head_start import lengthen_launch_queues
    from steplab.measurement.machine.world import join_world

    request = order.request
    if JOBS[request.job].holds_device:
        lengthen_launch_queues()
    stage, failed, world = "starting", False, None

    def tell(kind: str, value: Any) -> None:
        nonlocal stage, failed
        failure = getattr(value, "failure", None) if kind == "result" and place else None
        if kind == "stage":
            stage = value[0]
        if failure is None:
            send(kind, value)
        else:  # of one rank, and so of all
            failed = True
            hub.send("failed", failure)

    try:
        if place is not None:
            tell("stage", ["joining", 0])
            world = join_world(place, request.device, meet, folder=order.folder)
        answer(request, tell, world, next_turn)
        if world is not None and not failed:
            hub.send("ended")
            world.leave()
    except ERRORS as error:
        hub.send("refused", [own_error(error).exit_code, str(error)])
        failed = True
    except (Exception, SystemExit) as error:
        hub.send("failed", failure_from(error, stage, None, world.device if world else None))
        failed = True
    return not failed


def answer(
    request: Request,
    send: Callable[[str, Any], None],
    world: "World | None" = None,
    next_turn: Callable[[], Turn | None] = lambda: None,
) -> None:
    """Do the job, send messages about its progress and, last, the result; in a world every rank does so.

    `next_turn` gives a job that takes turns its next one.

    Raises one of `errors.ERRORS` for a request that cannot be served.
    """
    from steplab.measurement import compat

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
