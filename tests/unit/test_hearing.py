"""What becomes of a run of several processes, by what is heard of each; the ranks are played by this process."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from steplab.errors import UserError
from steplab.measurement import hearing
from steplab.measurement.channel import Channel, Whereabouts, whereabouts
from steplab.measurement.hearing import Hearing, Logs
from steplab.measurement.hub import GONE, LAUNCHER, Hub, command_line_of
from steplab.measurement.launch import Listener, Progress
from steplab.measurement.messages import Request
from steplab.measurement.torchrun import torchrun_around
from steplab.records.run import Failure

HERE = socket.gethostname()
SPOILT = Failure(kind="error", message="ValueError: spoilt", phase="measure")
LOST = Failure(kind="error", message="RuntimeError: gloo/transport: Connection closed by peer", phase="measure")


class Child:
    """The launcher, as far as its parent looks at it."""

    def __init__(self) -> None:
        self.exit_code: int | None = None

    def poll(self) -> int | None:
        return self.exit_code

    def wait(self, timeout: float | None = None) -> int | None:
        if self.exit_code is None and timeout is not None:
            raise subprocess.TimeoutExpired("launcher", timeout)
        return self.exit_code


class World:
    """A hub, a launcher and two ranks that have said hello and are measuring."""

    def __init__(self, logs: Path, hub: Hub, *, size: int = 2, joined: int | None = None) -> None:
        self.hub, self.child, self.heard = hub, Child(), list[Progress]()
        self.listener = Listener(self.heard.append)
        self.launcher = self.channel(LAUNCHER)
        self.ranks = [self.channel(rank) for rank in range(size if joined is None else joined)]
        for rank in self.ranks:
            rank.send("stage", ["measure", 10])
        self._logs, self._size = logs, size

    def channel(self, rank: int) -> Channel:
        return Channel("127.0.0.1", self.hub.port, self.hub.token, rank)

    def hear(self, timeout_s: float | None = None, is_joined: bool = False) -> Failure | None:
        with (self._logs / "errors").open("w+b") as errors:
            logs = Logs(folder=self._logs, errors=errors)
            request = Request(processes=self._size)
            child = cast("Any", self.child)
            return Hearing(self.hub, request, self.listener, timeout_s, child, logs, is_joined=is_joined).hear()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "_CAUSE_S", 0.3)
    monkeypatch.setattr(hearing, "_ANSWER_S", 0.3)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with closing(Hub(everywhere=False)) as opened:
        yield opened


@pytest.fixture
def world(tmp_path: Path, hub: Hub) -> World:
    return World(tmp_path, hub)


def end(channel: Channel) -> None:
    """As the end of its process does."""
    channel._socket.shutdown(socket.SHUT_RDWR)


def message_of(failure: Failure | None) -> str:
    assert failure is not None
    return failure.message


def test_the_first_rank_is_heard_and_the_others_only_move_the_clock(world: World) -> None:
    world.ranks[1].send("cell", "not for the listener")
    world.ranks[1].send("step", 7)
    world.ranks[0].send("step", 3)
    world.ranks[0].send("refused", [2, "this cannot be"])
    assert world.hear() is None
    assert isinstance(world.listener.refusal, UserError)
    assert [(told.stage, told.done) for told in world.heard] == [("starting", 0), ("measure", 0), ("measure", 3)]


def test_every_rank_is_sent_the_request(world: World) -> None:
    world.hear(timeout_s=0.1)
    for rank in world.ranks:
        message = rank.receive()
        assert message is not None
        assert message.kind == "request"
        assert json.loads(bytes(message.value))["processes"] == 2


def test_what_a_rank_says_of_itself_is_the_cause(world: World) -> None:
    world.ranks[0].send("failed", LOST)
    world.ranks[1].send("failed", SPOILT)
    failure = world.hear()
    assert message_of(failure) == f"rank 1 on {HERE}: ValueError: spoilt"
    assert failure is not None
    assert (failure.rank, failure.kind, failure.phase) == (1, "error", "measure")


def test_a_lost_connection_is_the_cause_where_nothing_else_is_known(world: World) -> None:
    world.ranks[1].send("failed", LOST)
    assert message_of(world.hear()) == f"rank 1 on {HERE}: {LOST.message}"


def test_of_two_that_ended_the_launcher_had_a_hand_in_one(world: World) -> None:
    folder = world._logs / "run" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("first line\nlast words\n")
    for rank in world.ranks:
        end(rank)
    world.launcher.send("exits", {0: -signal.SIGTERM, 1: -signal.SIGKILL})
    failure = world.hear()
    assert message_of(failure).startswith(f"rank 1 on {HERE}: the process was ended by SIGKILL during measure")
    assert failure is not None
    assert failure.last_lines == ("first line", "last words")


def test_a_rank_that_ends_without_an_exit_code_is_named_all_the_same(world: World) -> None:
    world.ranks[0].send("failed", LOST)
    end(world.ranks[1])
    assert message_of(world.hear()) == f"rank 1 on {HERE}: the process ended, or was cut off, during measure"


def test_a_command_line_of_torchrun_tells_how_its_rank_ended(world: World) -> None:
    end(world.ranks[1])
    crashed = Failure(kind="crashed", message="the process was ended by SIGKILL during build", signal="SIGKILL")
    world.channel(command_line_of(1)).send("failed", crashed)
    failure = world.hear(is_joined=True)
    assert message_of(failure) == f"rank 1 on {HERE}: {crashed.message}"


def test_a_first_rank_that_is_gone_and_does_not_exit_is_not_waited_for(world: World) -> None:
    end(world.ranks[0])
    message = f"rank 0 on {HERE}: the process ended, or was cut off, during measure"
    assert message_of(world.hear(is_joined=True)) == message


def test_a_launcher_that_ends_alone_is_the_cause(world: World, tmp_path: Path) -> None:
    world.child.exit_code = 1
    assert message_of(world.hear()) == "the process ended during measure with exit code 1"


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (("collective", "code"), "rank 1 on {host}: {what}: it is at m.py:1 in measure, and the others wait for it"),
        (("device", "collective"), "rank 0 on {host}: {what}: it waits for its device at m.py:0 in measure"),
        (("collective", None), "rank 1 on {host}: {what}: it does not answer in measure, and the others wait for it"),
        (("code", "code"), "the ranks {what}: rank 0 is at m.py:0; rank 1 is at m.py:1"),
        (("collective", "collective"), "the ranks {what}: rank 0 waits for other ranks at m.py:0"),
    ],
)
def test_the_rank_that_waits_for_nobody_is_the_one_that_hangs(
    world: World, states: tuple[str | None, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, state in enumerate(states):
        if state is not None:
            world.ranks[number].send("where", Whereabouts(state=state, line=f"m.py:{number}"))
    failure = world.hear(timeout_s=0.1)
    assert message_of(failure).startswith(told.format(host=HERE, what="did not end within 100 ms"))
    assert failure is not None
    assert failure.kind == "timeout"


def test_no_progress_ends_a_run_without_a_time_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "STALL_S", 0.1)
    assert message_of(world.hear()).startswith("the ranks made no progress for 100 ms: rank 0 does not answer")


def test_a_rank_that_never_came_is_named(tmp_path: Path, hub: Hub) -> None:
    world = World(tmp_path, hub, size=3, joined=2)
    assert message_of(world.hear(timeout_s=0.1)).startswith("rank 2: did not end within 100 ms: it never joined")


def test_who_does_not_know_the_token_is_not_heard(hub: Hub) -> None:
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.sendall(b'{"token": "guessed", "rank": 0, "host": "x", "pid": 1}\n{"kind": "failed"}\n')
        for _ in range(3):
            assert list(hub.poll(0.05)) == []
        assert stranger.recv(1) == b""
    channel = Channel("127.0.0.1", hub.port, hub.token, 0)
    assert [event.kind for _ in range(2) for event in hub.poll(1.0)] == ["hello"]
    end(channel)
    assert [event.kind for event in hub.poll(1.0)] == [GONE]


def test_a_rank_says_where_its_main_thread_stands() -> None:
    with ThreadPoolExecutor() as threads:
        where = threads.submit(whereabouts).result()
    assert where.state == "code"
    assert where.line.startswith("unit/test_hearing.py:")
    assert where.line.endswith(" in test_a_rank_says_where_its_main_thread_stands")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "the variable RANK is 'one' and should be a number"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        torchrun_around(variables)


def test_one_process_of_torchrun_is_a_process_like_any_other() -> None:
    assert torchrun_around({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert torchrun_around({"RANK": "0"}) is None
