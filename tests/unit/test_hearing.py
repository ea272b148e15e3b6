import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from steplab.errors import UserError
from steplab.measurement.jobs import JOBS
from steplab.measurement.machine.torchrun import LOOPBACK, ProcessPlace, Torchrun, torchrun_around
from steplab.measurement.processes import channel, hearing
from steplab.measurement.processes import hub as hub_module
from steplab.measurement.processes.channel import Channel, connect, whereabouts
from steplab.measurement.processes.hearing import Hearing
from steplab.measurement.processes.hub import GONE, Event, Hub, command_line_of
from steplab.measurement.processes.listener import Listener
from steplab.measurement.processes.messages import Whereabouts
from steplab.measurement.processes.ranks import environment_of
from steplab.measurement.progress import Progress
from steplab.records.failure import Failure

HERE = socket.gethostname()
SPOILT = Failure(kind="error", message="ValueError: spoilt", phase="measure")
LOST = Failure(kind="error", message="RuntimeError: gloo/transport: Connection closed by peer", phase="measure")


OPENED = list[Channel]()


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


class Process:
    def __init__(self) -> None:
        self.code: int | None = None

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        return self.code

    def last_lines(self) -> tuple[str, ...]:
        return ("first line", "last words")


class World:
    def __init__(self, hub: Hub, *, size: int = 2, joined: int = 0) -> None:
        self.hub, self.heard = hub, list[Progress]()
        self.listener = Listener(JOBS["step"], self.heard.append)
        self.processes = {number: Process() for number in range(1 if joined else size)}
        self.port = hub.listen(everywhere=False) if joined else 0
        self.ranks = [Channel(hub.adopt(number)) for number in self.processes]
        OPENED.extend(self.ranks)
        for number in range(1, joined):
            self.ranks.append(self.join(number))
        for rank in self.ranks:
            rank.send("stage", ["measure", 10])
        self._size = size

    def join(self, rank: int) -> Channel:
        return joined_by(self.hub, self.port, rank)[0]

    def hear(self, timeout_s: float | None = None) -> Failure | None:
        return Hearing(self.hub, self._size, self.listener, timeout_s, self.processes, exit_s=0.3).hear()

    def end(self, rank: int, code: int) -> None:
        self.processes[rank].code = code
        end(self.ranks[rank])


def joined_by(hub: Hub, port: int, rank: int) -> tuple[Channel, list[Event]]:
    events: list[Event] = []
    with ThreadPoolExecutor() as threads:
        connecting = threads.submit(connect, LOOPBACK, port, hub.token, rank)
        while not connecting.done():
            events += hub.poll(0.01)
        OPENED.append(connecting.result())
        return OPENED[-1], events


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "_CAUSE_S", 0.3)
    monkeypatch.setattr(hearing, "_COMMAND_LINE_S", 0.3)
    monkeypatch.setattr(hearing, "_ANSWER_S", 0.3)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with closing(Hub(3)) as opened:
        yield opened


@pytest.fixture
def world(hub: Hub) -> World:
    return World(hub)


@pytest.fixture
def joined_world(hub: Hub) -> World:
    return World(hub, joined=2)


def end(channel: Channel) -> None:
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
    heard = Hearing(world.hub, 2, world.listener, None, world.processes)
    for rank in (1, 0):
        world.end(rank, -signal.SIGABRT)
        while world.hub.is_connected(rank):
            for event in world.hub.poll(1.0):
                heard._take(event)
    assert message_of(heard.hear()).startswith(f"rank 1 on {HERE}: the process was ended by SIGABRT")


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
    end(world.ranks[1])
    assert message_of(world.hear()) == f"rank 1 on {HERE}: the process ended, or was cut off, during measure"


def test_a_command_line_of_torchrun_tells_how_its_rank_ended(joined_world: World) -> None:
    end(joined_world.ranks[1])
    crashed = Failure(kind="crashed", message="the process was ended by SIGKILL during build", signal="SIGKILL")
    joined_world.join(command_line_of(1)).send("failed", crashed)
    failure = joined_world.hear()
    assert message_of(failure) == f"rank 1 on {HERE}: {crashed.message}"


def test_a_first_rank_that_is_gone_and_does_not_exit_is_not_waited_for(joined_world: World) -> None:
    end(joined_world.ranks[0])
    message = f"rank 0 on {HERE}: the process ended, or was cut off, during measure"
    assert message_of(joined_world.hear()) == message


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
        b'{"kind": "stage", "value": ["measure", -1]}',
        b"x" * 3000,
    ],
)
def test_a_message_that_cannot_be_read_is_a_failure_of_its_rank(
    world: World, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ranks[1]._socket.sendall(line + b"\n")
    failure = world.hear()
    assert message_of(failure).startswith(f"rank 1 on {HERE}: the process sent an unreadable message during ")
    assert failure is not None
    assert failure.kind == "error"


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


def test_a_rank_that_never_came_is_named(hub: Hub) -> None:
    world = World(hub, size=3, joined=2)
    assert message_of(world.hear(timeout_s=0.1)).startswith("rank 2: did not end within 100 ms: it never joined")


# Who may connect where torchrun has started the ranks


@pytest.fixture
def port(hub: Hub) -> int:
    return hub.listen(everywhere=False)


def stranger(port: int, says: bytes = b"") -> socket.socket:
    connected = socket.create_connection((LOOPBACK, port), timeout=10)
    connected.sendall(says)
    return connected


@pytest.mark.parametrize(
    "says",
    [
        b'{"token": "guessed", "rank": 1, "host": "x"}\n{"kind": "failed"}\n',
        b'{"token": "\xff", "rank": 1, "host": "x"}\n',
        b'{"token": "\\ud800", "rank": 1, "host": "x"}\n',
        b'{"x": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
        b"[" * 3000 + b"]" * 3000 + b"\n",
        b"\xff\n",
        b"\n",
        b"x" * 100_000,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_stranger_is_cut_off_alone(hub: Hub, port: int, says: bytes) -> None:
    first, _ = joined_by(hub, port, 1)
    with stranger(port) as cut_off:
        with suppress(ConnectionError):  # cut off midway
            cut_off.sendall(says)
        for _ in range(5):
            assert list(hub.poll(0.05)) == []
        with suppress(ConnectionResetError):
            assert cut_off.recv(1) == b""
    second, _ = joined_by(hub, port, 2)
    for number, rank in enumerate((first, second), start=1):
        rank.send("step", number)
        assert [(event.rank, event.kind) for event in hub.poll(1.0)] == [(number, "step")]
    end(first)
    assert [(event.rank, event.kind) for event in hub.poll(1.0)] == [(1, GONE)]


def test_half_a_hello_is_waited_for_and_not_for_ever(hub: Hub, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_UNPROVEN_S", 0.3)
    with stranger(port, b'{"token": "') as slow:
        started_s = time.monotonic()
        while time.monotonic() - started_s < 0.6:
            assert list(hub.poll(0.05)) == []
        assert slow.recv(1) == b""
    assert not hub._unproven


def test_idle_connections_keep_no_rank_out(hub: Hub, port: int) -> None:
    idle = []
    try:
        for _ in range(1500):
            idle.append(stranger(port))
            if len(idle) % 500 == 0:  # else the backlog keeps even strangers out
                list(hub.poll(0.0))
        ranks = {}
        for rank in (1, 2):
            ranks[rank], _ = joined_by(hub, port, rank)
            ranks[rank].send("step", rank)
            assert [(event.rank, event.kind) for event in hub.poll(1.0)] == [(rank, "step")]
        assert len(hub._unproven) <= hub_module._MOST_UNPROVEN
    finally:
        for connection in idle:
            connection.close()


def test_a_rank_that_is_cut_off_unheard_tries_again(hub: Hub, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    admitted, cut_off = Hub._examine, list[hub_module._Connection]()

    def cut_off_once(self: Hub, connection: hub_module._Connection) -> Iterator[Event]:
        if cut_off:
            yield from admitted(self, connection)
        else:
            cut_off.append(connection)
            self._drop(connection)

    monkeypatch.setattr(Hub, "_examine", cut_off_once)
    joined, _ = joined_by(hub, port, 1)
    joined.send("step", 1)
    assert [(event.rank, event.kind) for event in hub.poll(1.0)] == [(1, "step")]


@pytest.mark.parametrize("rank", [0, 3, -4, -(10**18)])
def test_a_rank_that_is_there_already_or_cannot_be_is_not_let_in(
    hub: Hub, port: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_CONNECT_S", 0.3)
    hub.adopt(0).close()
    with pytest.raises(TimeoutError, match=f"the first process does not answer at {LOOPBACK} port {port}"):
        joined_by(hub, port, rank)


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
    far = Torchrun(rank=1, size=2, local_rank=0, local_size=1, address="node7", port=1, agent_store=True)
    assert not set(names) & set(environment_of(far))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert environment_of(place)["GLOO_SOCKET_IFNAME"] == "eth7"


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
        ({"RANK": "one", "WORLD_SIZE": "2"}, "the variable RANK must be a number, not 'one'"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(variables: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        torchrun_around(variables)


def test_one_process_of_torchrun_is_a_process_like_any_other() -> None:
    assert torchrun_around({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert torchrun_around({"RANK": "0"}) is None
