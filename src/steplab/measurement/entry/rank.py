"""One of several processes that measure together.

Started as `python -m steplab.measurement.entry.rank FD`, with an order on standard input. The first rank, and every
rank that steplab starts itself, belongs to the process that listens to all ranks; FD is its connection to that process,
and the rank ends when the connection does. Any other rank of torchrun belongs to a command line of its own and answers
it on FD; it finds the first command line through the store where all ranks meet.
"""

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from steplab.errors import SteplabError
from steplab.measurement.entry.child import answer, end_with_parent, order_of
from steplab.measurement.jobs import JOBS
from steplab.measurement.machine.torchrun import LOOPBACK, ProcessPlace, place_in, torchrun_around
from steplab.measurement.processes.channel import Channel, connect
from steplab.measurement.processes.messages import BadMessage, JointOutcome, Order, hub_at
from steplab.measurement.processes.started import named
from steplab.records.codec import encode
from steplab.records.failure import Failure

_OF_EVERY_RANK = ("stage", "step")
"""The messages that the hub hears from every rank; from the first rank it hears all."""
_VERDICT_S = 20.0
"""How long a rank that has finished waits for the verdict over all ranks."""
_FOLDER_KEPT_S = 0.25
"""How long the folder of the meeting stays once the parent is gone. A rank that just opens its store there has ended by
then; without the folder torch would wait for it for minutes, and let no other thread of the rank run."""


def main() -> None:
    order = order_of(Order)
    descriptor = int(sys.argv[1])
    if order.folder is not None or order.hub is not None:
        _heard_by_parent(order, descriptor)
    else:
        _heard_by_first(order, descriptor)


def _heard_by_parent(order: Order, descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor))

    def on_end(why: str) -> None:
        print(f"steplab: {why}", file=sys.stderr, flush=True)
        if order.folder is not None:
            time.sleep(_FOLDER_KEPT_S)
            shutil.rmtree(order.folder, ignore_errors=True)  # the parent may have been killed
        os.killpg(0, signal.SIGKILL)

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

    channel.listen(on_verdict=lambda verdict: None, on_end=on_end)
    place = place_in()
    if not _work(order, place, channel, meet):
        time.sleep(_VERDICT_S)  # it is ended from outside once the cause is known: an exit here would hide the cause
        sys.exit(1)


def _heard_by_first(order: Order, descriptor: int) -> None:
    from steplab.measurement.machine.world import meeting_place

    pipe = os.fdopen(descriptor, "wb", buffering=0)
    threading.Thread(target=end_with_parent, daemon=True).start()
    heard, around = threading.Event(), torchrun_around()
    assert around is not None
    rank = around.rank

    def tell(kind: str, value: Any) -> None:
        pipe.write(encode({"kind": kind, "value": value}) + b"\n")

    def on_verdict(verdict: JointOutcome) -> None:
        if verdict.failure is not None or verdict.refused is not None:
            tell("failed" if verdict.failure else "refused", verdict.failure or verdict.refused)
            os._exit(1)  # the main thread may wait forever in a collective
        heard.set()

    def lost(why: str) -> None:
        tell("failed", named(Failure(kind="crashed", message=why), rank, socket.gethostname()))

    def on_end(why: str) -> None:
        if not heard.is_set():
            lost(why)
            os._exit(1)

    try:
        store = meeting_place(around)
        port, token = hub_at(store.get("hub"))
        address = LOOPBACK if around.is_on_one_machine else around.address
        channel = connect(address, port, token, rank)
    except (OSError, RuntimeError, BadMessage) as error:  # torch's store raises RuntimeErrors
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        lost(f"it found no way to the first process: {first_line}")
        sys.exit(1)
    tell("hub", (address, port, token))
    channel.listen(on_verdict, on_end)
    said: list[tuple[str, Any]] = []

    def say(kind: str, value: Any) -> None:
        if kind in _OF_EVERY_RANK:
            tell(kind, value)
        else:  # the last messages of this rank count only if all ranks succeed
            said.append((kind, value))

    _work(order, around, channel, lambda: store, say)
    if not heard.wait(_VERDICT_S):
        sys.exit(1)
    for kind, value in said:
        tell(kind, value)


def _work(
    order: Order,
    place: ProcessPlace,
    channel: Channel,
    meet: Callable[[], Any],
    say: Callable[[str, Any], None] = lambda kind, value: None,
) -> bool:
    """Do the job, and tell the hub how it ended; returns whether it succeeded.

    `meet` returns the store where all ranks meet. `say` receives the messages of every rank but the first.
    """
    from steplab.measurement.machine.failures import failure_from
    from steplab.measurement.machine.head_start import lengthen_launch_queues
    from steplab.measurement.machine.world import join_world

    request = order.request
    if JOBS[request.job].holds_device:
        lengthen_launch_queues()
    stage, failed = "joining", False

    def send(kind: str, value: Any) -> None:
        nonlocal stage, failed
        failure = getattr(value, "failure", None) if kind == "result" else None
        if kind == "stage":
            stage = value[0]
        if failure is not None:
            failed = True
            channel.send("failed", failure)
        else:
            if place.is_first or kind in _OF_EVERY_RANK:
                channel.send(kind, value)
            if not place.is_first:
                say(kind, value)

    world = None
    try:
        send("stage", [stage, 0])
        world = join_world(place, request.device, meet, folder=order.folder)
        answer(request, send, world)
        if not failed:
            channel.send("ended")
            world.leave()
    except SteplabError as error:
        channel.send("refused", [error.exit_code, str(error)])
        failed = True
    except Exception as error:
        channel.send("failed", failure_from(error, stage, None, world.device if world else None))
        failed = True
    return not failed


if __name__ == "__main__":
    main()
