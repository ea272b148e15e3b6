import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from steplab.measurement.jobs import JOBS
from steplab.measurement.machine.torchrun import LOOPBACK
from steplab.measurement.processes import channel, conversation, hearing, messages
from steplab.measurement.processes.channel import Channel, connect
from steplab.measurement.processes.conversation import Conversation, Surroundings
from steplab.measurement.processes.hearing import Hearing
from steplab.measurement.processes.hub import Hub
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import BadMessage, Request, hub_at, lines_of, read
from steplab.records.failure import Failure

REQUEST = Request(job="step", task=msgspec.Raw(b"null"))


def heard(folder: Path, program: str) -> Failure:
    (folder / "sayer.py").write_text(f"import os, sys, time\nmain, fd = int, int(sys.argv[1])\n{program}\n")
    found_there = Surroundings(environment=os.environ | {"PYTHONPATH": str(folder)})
    with (
        patch.object(conversation, "CHILD", "sayer"),
        Conversation(REQUEST, Listener(JOBS["step"]), 20.0, surroundings=found_there) as child,
    ):
        failure = child.listen()
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"Epoch 1: loss 2.0", "JSON is malformed"),
        (b'{"kind": "stage", "value": ["build', "truncated"),
        (b"\xff\xfe", "JSON is malformed"),
        (b'{"kind": "stage", "value": ["b\xffuild", 0]}', "invalid start byte"),
        (b'{"kind": "shutdown"}', "Invalid enum value 'shutdown'"),
        (b'{"kind": "step", "value": "three"}', "Expected `int`, got `str`"),
        (b'{"kind": "step", "value": -1}', "must not be negative, but is -1"),
        (b'{"kind": "step", "value": 1e300}', "Expected `int`"),
        (b'{"kind": "measured", "value": {"id": "0"}}', "Object missing required field"),
        (b'{"kind": "step", "value": ' + b"[" * 5000 + b"}", "recursion"),
    ],
)
def test_what_is_no_message_of_a_child_ends_it_in_one_line(tmp_path: Path, said: bytes, why: str) -> None:
    began_s = time.monotonic()
    failure = heard(tmp_path, f"os.write(fd, {said!r} + b'\\n')\ntime.sleep(600)")
    assert time.monotonic() - began_s < 60
    assert failure.kind == "error"
    assert failure.message.startswith("the process sent an unreadable message during starting: ")
    assert why in failure.message
    assert failure.message.isprintable()


def test_a_line_without_end_takes_no_memory_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_BYTES", 100_000)
    failure = heard(tmp_path, "while True: os.write(fd, b'x' * 65536)")
    assert failure.message.endswith(" it has more than 97.7 KiB")


def test_a_child_that_has_closed_its_connection_and_goes_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "EXIT_S", 0.2)
    failure = heard(tmp_path, r"print('\x1b[31mdaemon', flush=True); os.close(fd); time.sleep(600)")
    assert failure.message == "the process closed its connection during starting and did not end"
    assert (failure.kind, failure.signal, failure.last_lines) == ("crashed", None, ("daemon",))


def test_lines_end_where_their_sender_does() -> None:
    assert list(lines_of(io.BytesIO(b"1\n2\nhal"))) == [b"1\n", b"2\n"]
    assert list(lines_of(io.BytesIO(b""))) == []


def test_texts_of_another_process_are_cleaned() -> None:
    failure = Failure(kind="error", message="\x1b]0;title\x07loss\nis \u202enan")
    assert read(msgspec.json.encode(failure), Failure).message == "loss\\nis \\u202enan"


@pytest.mark.parametrize("text", [b"", b"\xff", b"80", b"80:token", b"123456:" + b"0" * 32, b"80:" + b"0" * 33])
def test_what_is_no_address_at_the_meeting_place_is_refused(text: bytes) -> None:
    with pytest.raises(BadMessage, match="no port and token"):
        hub_at(text)
    assert hub_at(b"80:" + b"0f" * 16) == (80, "0f" * 16)


# At the hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with closing(Hub(1)) as opened:
        yield opened


def test_a_rank_that_sends_a_line_without_end_is_cut_off_and_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_BYTES", 100_000)
    monkeypatch.setattr(hearing, "_CAUSE_S", 0.1)
    with hub.adopt(0) as rank:

        def flood() -> None:
            sent = 0
            try:
                while True:
                    sent += rank.send(b"x" * 65536)
            except OSError:
                assert sent < 10_000_000

        flooding = threading.Thread(target=flood)
        flooding.start()
        failure = Hearing(hub, 2, Listener(JOBS["step"]), 20.0, {}).hear()
        flooding.join(20)
    assert failure is not None
    assert failure.message.startswith(f"rank 0 on {socket.gethostname()}: the process sent an unreadable message")
    assert not hub.is_connected(0)


# In a rank, which hears the hub


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "the connection to the first process ended"),
        (b'{"kind": "verd', "the connection to the first process ended"),
        (b"GET /\n", "the first process sent an unreadable message: JSON is malformed"),
        (b'{"kind": "verdict", "value": 3}\n', "the first process sent an unreadable message: Expected `object`"),
        (b'{"kind": "order", "value": {"job": "step"}}\n', "the first process sent an unreadable message: Object miss"),
    ],
)
def test_a_rank_ends_by_what_is_no_message_of_the_hub(said: bytes, why: str) -> None:
    ours, theirs = socket.socketpair()
    ended, reasons = threading.Event(), list[str]()

    def on_end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    with ours, theirs:
        Channel(theirs).listen(on_end)
        ours.sendall(said)
        ours.shutdown(socket.SHUT_WR)
        assert ended.wait(20)
    assert reasons[0].startswith(why)


@pytest.mark.parametrize(
    "answer", [b"", b"x", b"HTTP/1.1 400 Bad Request\r\n", b"\n", b'{"kind": "where"}\n', b"x" * 5000]
)
def test_what_is_no_hub_is_not_waited_for(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_CONNECT_S", 0.15)
    with socket.create_server((LOOPBACK, 0)) as other:
        others = list[socket.socket]()

        def serve() -> None:
            while True:
                try:
                    others.append(other.accept()[0])
                    others[-1].sendall(answer)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        port = other.getsockname()[1]
        with pytest.raises(TimeoutError, match=r"does not answer|timed out"):
            connect(LOOPBACK, port, "token", 1)
        other.shutdown(socket.SHUT_RDWR)
    for opened in others:
        opened.close()
