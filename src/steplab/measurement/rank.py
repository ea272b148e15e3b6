"""One of several processes that measure together.

Started by torch's elastic launcher (elastic.py) as `python -m steplab.measurement.rank`; the request then comes over
the hub's connection, and nothing lives on when that ends. Or, where torchrun started a command line for each rank, by
that command line (launch.py) as `python -m steplab.measurement.rank FD`, with an order on standard input; this process
then finds the first command line's hub through the store where all ranks meet, and answers its own on FD.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from steplab.errors import SteplabError
from steplab.measurement.channel import HUB_VARIABLE, Channel
from steplab.measurement.child import Request, answer, end_with_parent
from steplab.measurement.torchrun import Torchrun, torchrun_around
from steplab.records.codec import encode
from steplab.records.run import Failure

_OF_EVERY_RANK = ("stage", "step")
"""The hub hears of every rank's progress, and of the first one all."""
_VERDICT_S = 20.0
"""How long a rank that is done waits to hear what became of all."""


class Verdict(msgspec.Struct):
    """What became of all ranks, for each to tell its own command line; neither: all went well."""

    failure: Failure | None = None
    refused: tuple[int, str] | None = None
    """Exit code and text."""


class Order(msgspec.Struct):
    """What the command line of a rank wants done."""

    request: Request
    port: int | None = None
    """Of this command line's hub; None: it is not the first, and the store tells."""
    token: str | None = None


def main() -> None:
    place = torchrun_around()
    assert place is not None
    if len(sys.argv) > 1:
        _joined(place, int(sys.argv[1]))
    else:
        _launched(place)


def _launched(place: Torchrun) -> None:
    port, token = os.environ[HUB_VARIABLE].split(":")
    channel = Channel("127.0.0.1", int(port), token, place.rank)
    message = channel.receive()
    if message is None:
        return  # the parent has ended meanwhile
    channel.listen(on_verdict=lambda verdict: None, on_end=_end_group)
    if not _work(msgspec.json.decode(message.value, type=Request), place, channel):
        time.sleep(_VERDICT_S)  # ended from outside, once the cause is known: an exit here would hide it
        sys.exit(1)


def _joined(place: Torchrun, descriptor: int) -> None:
    from steplab.measurement.world import meeting_place

    pipe = os.fdopen(descriptor, "wb", buffering=0)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    threading.Thread(target=end_with_parent, daemon=True).start()
    heard = threading.Event()

    def tell(kind: str, value: Any) -> None:
        pipe.write(encode({"kind": kind, "value": value}) + b"\n")

    def on_verdict(value: msgspec.Raw) -> None:
        verdict = msgspec.json.decode(value, type=Verdict)
        if verdict.failure is not None or verdict.refused is not None:
            tell("failed" if verdict.failure else "refused", verdict.failure or verdict.refused)
            os._exit(1)  # the main thread may wait in a collective for ever
        heard.set()

    def on_end() -> None:
        if not heard.is_set():
            tell("failed", Failure(kind="crashed", message="the connection to the first process ended"))
            os._exit(1)

    store = meeting_place(place)
    # Several measurements in turn find the store as the ones before have left it: each has keys of its own.
    store = meeting_place(place, f"{store.add(f'arrivals/{place.rank}', 1)}/")
    if place.is_first:
        store.set("hub", f"{order.port}:{order.token}")
    port, token = store.get("hub").decode().split(":")
    channel = Channel("127.0.0.1" if place.is_first else place.address, int(port), token, place.rank)
    if not place.is_first:
        tell("hub", (place.address, int(port), token))
    channel.listen(on_verdict, on_end)
    said: list[tuple[str, Any]] = []

    def say(kind: str, value: Any) -> None:
        if kind in _OF_EVERY_RANK:
            tell(kind, value)
        else:  # the last words of this rank count only if those of all do
            said.append((kind, value))

    _work(order.request, place, channel, store, say)
    if not heard.wait(_VERDICT_S):
        sys.exit(1)
    for kind, value in said:
        tell(kind, value)


def _work(
    request: Request,
    place: Torchrun,
    channel: Channel,
    store: Any = None,
    say: Callable[[str, Any], None] = lambda kind, value: None,
) -> bool:
    """Do what is asked for, and tell the hub how it ended; whether well. `say` hears what ranks but the first say."""
    from steplab.measurement.failures import failure_from
    from steplab.measurement.head_start import lengthen_launch_queues
    from steplab.measurement.world import join_world

    if request.comm is not None or request.ddp is not None:
        lengthen_launch_queues()
    stage, failed = "joining", False

    def send(kind: str, value: Any) -> None:
        nonlocal stage, failed
        failure = getattr(value, "failure", None) if kind == "record" else None
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
        device = request.step.device if request.step else request.device
        world = join_world(place, device, store=store)
        answer(request, send, world)
        if not failed:
            channel.send("ended")
            world.leave()
    except SteplabError as error:
        channel.send("refused", [error.exit_code, str(error)])
        failed = True
    except Exception as error:
        channel.send("failed", failure_from(error, stage, request.step, world.device if world else None))
        failed = True
    return not failed


def _end_group() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
