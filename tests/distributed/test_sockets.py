"""Listening sockets during measurements of several processes, and a stranger's access to them; `ss -ltnp` shows the
same.
"""

import ipaddress
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from tests.cli.program import Program, finish, is_gone, tiny, wait_until
from tests.distributed.test_launch import processes_in, start_joined, without_device
from tests.first import first

STRANGER = """
import base64, os, pickle, sys, threading, time
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore

class WritesFile:
    def __reduce__(self):
        return Path.touch, (Path(sys.argv[1]),)

def write(port):
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5))
    store.set("torch.rendezvous.steplab", base64.b64encode(pickle.dumps(WritesFile())))
    print(port, flush=True)

threads = [threading.Thread(target=write, args=(int(port),), daemon=True) for port in sys.argv[2:]]
for thread in threads:
    thread.start()
ends = time.monotonic() + 5
for thread in threads:
    thread.join(max(0, ends - time.monotonic()))
os._exit(0)  # what is no store leaves its client waiting
"""
"""Writes, into each store that allows it, a pickle where torch's elastic launcher unpickles; prints those ports."""
NUM_IDLE = 1500


def listening(folder: Path) -> set[tuple[str, int]]:
    found = set()
    for process in processes_in(folder):
        try:
            connections = process.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and connection.laddr):
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


COMMANDS = {
    "run": ("run", *without_device(), "--processes", "2"),
    # Calls of a second together, as a look at all processes may take half a second on a busy machine.
    "comm": ("comm", "--size", "16MB", "--repeats", "50", "--collective", "all_reduce", "--processes", "2"),
    "ddp": ("ddp", *without_device(), "--variants", "bucketed:1", "--processes", "2"),
}


@pytest.mark.parametrize("name", first(2, COMMANDS))
def test_nothing_listens_beyond_loopback(steplab: Program, name: str) -> None:
    command = steplab.start(*COMMANDS[name])
    seen = set[tuple[str, int]]()
    while not is_gone(command):
        seen |= listening(steplab.folder)
        time.sleep(0.05)  # a look at all processes takes time from the ranks
    result = finish(command)
    assert result.code == 0, result.stderr
    assert {address for address, _ in seen if not is_loopback(address)} == set()
    assert len(seen) >= 2, "gloo's at the least were seen"


@pytest.mark.release
def test_no_store_takes_what_a_stranger_writes(steplab: Program) -> None:
    steplab.write("hold", "")
    command = steplab.start("run", *without_device(), "--model", "faulty:held", "--processes", "2")
    wait_until(lambda: (steplab.cwd / "reached").exists(), "a step of both ranks")
    written = steplab.folder / "written by a stranger"
    ports = listening(steplab.folder)
    assert ports
    words = [sys.executable, "-c", STRANGER, str(written), *(str(port) for _, port in ports)]
    stranger = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert stranger.stdout.split() == []
    (steplab.cwd / "hold").unlink()
    result = finish(command)
    assert result.code == 0, result.stderr
    assert not written.exists()


SAYINGS: Sequence[bytes] = (b"\xff\n", b'{"x": ' + b"[" * 3000 + b"]" * 3000 + b"}\n", b'{"token": "', b"x" * 100_000)


def test_joined_ranks_of_one_machine_listen_on_loopback_and_strangers_do_them_no_harm(steplab: Program) -> None:
    steplab.write("hold", "")
    commands = start_joined(steplab, "run", *tiny(), "--model", "faulty:held")
    wait_until(lambda: (steplab.cwd / "reached").exists(), "a step of both ranks")
    ports = listening(steplab.folder)
    assert {address for address, _ in ports if not is_loopback(address)} == set()
    with ExitStack() as strangers:
        for address, port in ports:
            for says in (*SAYINGS, *[b""] * (NUM_IDLE // len(ports))):
                stranger = strangers.enter_context(socket.create_connection((address, port), timeout=10))
                stranger.setblocking(False)
                try:
                    stranger.send(says)
                except (BlockingIOError, ConnectionError):
                    continue  # it is cut off already
        (steplab.cwd / "hold").unlink()
        results = [finish(command) for command in commands]
    assert [result.code for result in results] == [0, 0], [result.stderr for result in results]
