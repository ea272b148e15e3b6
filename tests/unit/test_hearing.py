import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest

from steplab.errors import UserError
from steplab.measurement.jobs import JOBS
from steplab.measurement.machine.torchrun import ProcessPlace, Torchrun, environment_of, torchrun_around
from steplab.measurement.processes import conversation
from steplab.measurement.processes.child import whereabouts
from steplab.measurement.processes.conversation import Conversation, Listener
from steplab.measurement.processes.wire import Request, Whereabouts, Wire
from steplab.measurement.progress import Progress
from steplab.records.failure import Failure

HERE = socket.gethostname()
SPOILT = Failure(kind="error", message="ValueError: spoilt", phase="measure")
LOST = Failure(kind="error", message="RuntimeError: gloo/transport: Connection closed by peer", phase="measure")


class Process:
    def __init__(self, words: Sequence[str], *, pass_fds: Sequence[int], **rest: object) -> None:
        self.wire = Wire(Connection(os.dup(pass_fds[0])))
        self.code: int | None = None

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        return self.code

    def last_lines(self) -> tuple[str, ...]:
        return ("first line", "last words")

    def end(self) -> None:
        if not self.wire.connection.closed:
            self.wire.connection.close()


class World:
    def __init__(self) -> None:
        self.heard = list[Progress]()
        self.listener = Listener(JOBS["step"], self.heard.append)
        request = Request(job="step", task=msgspec.Raw(b"null"), processes=2)
        self.conversation = Conversation(request, self.listener, None)
        self.processes: list[Any] = [rank.process for rank in self.conversation._ranks]
        self.ranks: list[Wire] = [process.wire for process in self.processes]
        for rank in self.ranks:
            rank.send("stage", ["measure", 10])

    def hear(self, timeout_s: float | None = None) -> Failure | None:
        self.conversation._timeout_s = timeout_s
        return self.conversation.listen()

    def end(self, rank: int, code: int | None) -> None:
        self.processes[rank].code = code
        self.ranks[rank].connection.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(conversation, "Started", Process)
    for name in ("_CAUSE_S", "_ANSWER_S", "EXIT_S"):
        monkeypatch.setattr(conversation, name, 0.3)
    opened = World()
    with opened.conversation:
        yield opened


def message_of(failure: Failure | None) -> str:
    assert failure is not None
    return failure.message


def test_the_first_rank_is_heard_and_the_others_only_move_the_clock(world: World) -> None:
    world.ranks[1].send("cell", "not for the listener")
    world.ranks[1].send("step", 7)
    world.ranks[0].send("step", 3)
    world.ranks[0].send("refused", [2, "this cannot be"])
    with pytest.raises(UserError, match="this cannot be"):
        world.hear()
    assert [(told.stage, told.done) for told in world.heard] == [("starting", 0), ("measure", 0), ("measure", 3)]


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


def test_a_killed_rank_is_named_with_its_last_lines_though_another_has_lost_it(world: World) -> None:
    world.ranks[0].send("failed", LOST)
    world.end(1, -signal.SIGKILL)
    failure = world.hear()
    assert message_of(failure).startswith(f"rank 1 on {HERE}: the process was ended by SIGKILL during measure")
    assert failure is not None
    assert failure.last_lines == ("first line", "last words")


def test_of_two_that_ended_the_earlier_is_the_cause(world: World) -> None:
    world.end(1, -signal.SIGABRT)
    while not world.conversation._gone:
        world.conversation._receive_some()
    world.end(0, -signal.SIGABRT)
    assert message_of(world.hear()).startswith(f"rank 1 on {HERE}: the process was ended by SIGABRT")


def test_a_process_whose_connection_something_holds_open_is_named_by_its_exit(world: World) -> None:
    world.processes[1].code = 3
    assert message_of(world.hear()) == f"rank 1 on {HERE}: the process ended during measure with exit code 3"


def test_a_first_rank_that_ends_well_without_a_last_word_is_no_result(world: World) -> None:
    world.ranks[0].send("ended")
    world.processes[0].code = 0
    assert message_of(world.hear()) == f"rank 0 on {HERE}: the process ended during measure with exit code 0"


def test_a_rank_that_ends_after_its_last_word_is_not_in_trouble(world: World) -> None:
    world.ranks[1].send("ended")
    world.end(1, 0)
    assert message_of(world.hear(timeout_s=1.0)).startswith(f"rank 0 on {HERE}: did not end within")


def test_a_rank_that_ends_without_an_exit_code_is_named_all_the_same(world: World) -> None:
    world.ranks[0].send("failed", LOST)
    world.end(1, None)
    assert message_of(world.hear()) == f"rank 1 on {HERE}: the process ended, or was cut off, during measure"


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        b"[" * 3000 + b"]" * 3000,
        b"{}",
        b'{"kind": "stage", "value": "measure"}',
        b'{"kind": "failed", "value": {"kind": "\xff"}}',
        b'{"kind": "where", "value": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"kind": "gone"}',
        b'{"kind": "where", "value": null}',
        b'{"kind": "stage", "value": ["measure", -1]}',
        b"x" * 3000,
    ],
)
def test_a_message_that_cannot_be_read_is_a_failure_of_its_rank(
    world: World, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ranks[1].connection.send_bytes(line)
    failure = world.hear()
    assert message_of(failure).startswith(f"rank 1 on {HERE}: the process sent an unreadable message during ")
    assert failure is not None
    assert failure.kind == "error"


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (
            ("collective", "code"),
            "rank 1 on {host}: {what}: it is at m.py:1 during measure, and the others wait for it",
        ),
        (("device", "collective"), "rank 0 on {host}: {what}: it waits for its device at m.py:0 during measure"),
        (
            ("collective", None),
            "rank 1 on {host}: {what}: it does not answer during measure, and the others wait for it",
        ),
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
    monkeypatch.setattr(conversation, "STALL_S", 0.1)
    assert message_of(world.hear()).startswith("the ranks made no progress for 100 ms: rank 0 does not answer")


def test_ranks_of_one_machine_are_kept_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    place = ProcessPlace(rank=1, size=2, local_rank=1, local_size=2)
    here = environment_of(place)
    loopback = here["GLOO_SOCKET_IFNAME"]
    assert [name for _, name in socket.if_nameindex() if name == loopback] == [loopback]
    assert (here["NCCL_SOCKET_IFNAME"], here["NCCL_RAS_ENABLE"]) == (f"={loopback}", "0")
    assert torchrun_around(here | {"MASTER_ADDR": "x", "MASTER_PORT": "1"}) == Torchrun(
        rank=1, size=2, local_rank=1, local_size=2, address="x", port=1, agent_store=False
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert environment_of(place)["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_rank_says_where_its_main_thread_stands() -> None:
    with ThreadPoolExecutor() as threads:
        where = threads.submit(whereabouts, threading.main_thread()).result()
    assert where.state == "code"
    assert where.line.startswith("unit/test_hearing.py:")
    assert where.line.endswith(" in test_a_rank_says_where_its_main_thread_stands")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "the variable RANK must be a number, not 'one'"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        torchrun_around(variables)


def test_one_process_of_torchrun_is_a_process_like_any_other() -> None:
    assert torchrun_around({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert torchrun_around({"RANK": "0"}) is None
