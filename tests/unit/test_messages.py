import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from steplab.measurement.jobs import JOBS
from steplab.measurement.processes import conversation, wire
from steplab.measurement.processes.conversation import Conversation, Listener, Surroundings
from steplab.measurement.processes.started import Started
from steplab.measurement.processes.wire import BadMessage, Message, Request, read, wire_to_a_child
from steplab.python import python_running
from steplab.records.failure import Failure

REQUEST = Request(job="step", task=msgspec.Raw(b"null"))


def heard(folder: Path, program: str) -> Failure:
    head = "import os, sys, time\nfrom multiprocessing.connection import Connection\nmain, fd = int, int(sys.argv[1])"
    (folder / "sayer.py").write_text(f"{head}\n{program}\n")
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
    failure = heard(tmp_path, f"Connection(fd).send_bytes({said!r})\ntime.sleep(600)")
    assert time.monotonic() - began_s < 60
    assert failure.kind == "error"
    assert failure.message.startswith("the process sent an unreadable message during starting: ")
    assert why in failure.message
    assert failure.message.isprintable()


def test_what_is_no_message_at_all_takes_no_memory_beyond_the_bound(tmp_path: Path) -> None:
    failure = heard(tmp_path, "while True: os.write(fd, b'x' * 65536)")
    assert failure.message.endswith(" it has more than 256 MiB")


def test_a_child_that_has_closed_its_connection_and_goes_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "EXIT_S", 0.2)
    failure = heard(tmp_path, r"print('\x1b[31mdaemon', flush=True); os.close(fd); time.sleep(600)")
    assert failure.message == "the process closed its connection during starting and did not end"
    assert (failure.kind, failure.signal, failure.last_lines) == ("crashed", None, ("daemon",))


def test_texts_of_another_process_are_cleaned() -> None:
    failure = Failure(kind="error", message="\x1b]0;title\x07loss\nis \u202enan")
    assert read(msgspec.json.encode(failure), Failure).message == "loss\\nis \\u202enan"


def test_half_a_message_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_PATIENCE_S", 1)
    ours, theirs = wire_to_a_child()
    with ours.connection, theirs:
        os.write(theirs.fileno(), b"\0\0\0\x09{")
        with pytest.raises(BadMessage, match="breaks off"):
            ours.receive()


def test_a_sender_that_ends_within_a_message_is_gone() -> None:
    ours, theirs = wire_to_a_child()
    with ours.connection:
        with theirs:
            theirs.send_bytes(b'{"kind": "ready"}')
            os.write(theirs.fileno(), b"\0\0\0\x09{")
        assert ours.receive() == Message(kind="ready")
        assert ours.receive() is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (None, "the connection to the first process ended"),
        (b"GET /", "the first process sent an unreadable message: JSON is malformed"),
        (b'{"kind": "request", "value": {"job": "step"}}', "the first process sent an unreadable message: Object miss"),
    ],
)
def test_a_rank_ends_by_what_is_no_message_of_its_parent(said: bytes | None, why: str) -> None:
    ours, theirs = wire_to_a_child()
    with ours.connection, theirs:
        words = python_running("steplab.measurement.processes.child", str(theirs.fileno()))
        process = Started(words, pass_fds=[theirs.fileno()])
        theirs.close()
        if said is not None:
            ours.connection.send_bytes(said)
        else:
            ours.connection.close()
        assert process.exit_code(wait_s=60) == -signal.SIGKILL
        (line,) = process.last_lines()
        process.end()
    assert line.startswith(f"steplab: {why}")
