"""Runs functions on several ranks at once, in processes joined by gloo, and reports failures of any.

Ranks stay for the next function: they are forked from tests.cli.preloaded and joined once. After a failure or hang the
world is dropped, since its ranks disagree about the next call.
"""

import atexit
import contextlib
import gc
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import psutil  # type: ignore[import-untyped]
import pytest
from tests.cli.preloaded import Started
from tests.cli.program import REPOSITORY, preloaded

TIMEOUT_S = 60
"""Seconds for one function on all ranks, which are many for few cores."""
COLLECTIVE_TIMEOUT_S = 30
GRACE_S = 3
"""Seconds for other ranks to report after a failure."""


def on_ranks(size: int, function: Callable[..., None], *arguments: object) -> None:
    """Call the function on each of `size` ranks; raises AssertionError with every failing rank's traceback.

    Function and arguments are pickled, so the function must be importable.
    """
    world = _worlds.get(size) or World(size)
    _worlds[size] = world
    failure = world.run(function, arguments)
    if failure:
        world.close()
        del _worlds[size]
        raise AssertionError(failure)


class Cases:
    """Cases of a test file: functions without arguments for every rank. A test passes them on by `cases.run(size,
    subtests)`.
    """

    def __init__(self) -> None:
        self.functions: list[Callable[[], None]] = []
        self.small: set[Callable[[], None]] = set()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.functions.append(function)
        return function

    def in_a_small_world(self, function: Callable[[], None]) -> Callable[[], None]:
        self.small.add(function)
        return self(function)

    def run(self, size: int, subtests: pytest.Subtests) -> None:
        for function in self.functions:
            if size == 2 or function not in self.small:
                with subtests.test(msg=function.__name__):
                    on_ranks(size, function)


class World:
    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._ranks: list[Started] = []
        for rank in range(size):
            here, there = socket.socketpair()
            words = [__file__, str(rank), str(size), self._folder.name]
            with there:
                self._ranks.append(
                    preloaded().start("python", words, cwd=str(REPOSITORY), environment=dict(os.environ), stdin=there)
                )
            self._pipes.append(Connection(here.detach()))
        atexit.register(self.close)  # before the process that they are forked from, which waits for them

    def run(self, function: Callable[..., None], arguments: Sequence[object]) -> str:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and what it said before is read below
                pipe.send((function, arguments))
        waiting = list(self._pipes)
        failures: list[str] = []
        deadline = time.monotonic() + TIMEOUT_S
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in filter(ready.__contains__, self._pipes):
                waiting.remove(pipe)
                if report := _received(pipe):
                    failures.append(f"rank {self._pipes.index(pipe)}: {report}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                silent = ", ".join(str(self._pipes.index(pipe)) for pipe in waiting)
                after = f"{GRACE_S} s after another rank failed" if failures else f"after {TIMEOUT_S} s"
                failures.append(f"rank {silent}: still in {function.__name__} {after}")
                break
        return "\n".join(failures)

    def close(self) -> None:
        atexit.unregister(self.close)
        for process in self._ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            process.communicate()
        self._folder.cleanup()


def _received(pipe: Connection) -> str:
    try:
        return str(pipe.recv())
    except EOFError:
        return "the process ended"


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    try:
        _join(rank, size, folder)
        while True:
            function, arguments = pipe.recv()
            _do(function, arguments)
            pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())
        time.sleep(GRACE_S)  # the others must fail by their own faults, not by this one's absence


def _join(rank: int, size: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported stays
    torch.set_num_threads(1)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, world_size=size, rank=rank)


def _do(function: Callable[..., None], arguments: Sequence[object]) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    function(*arguments)
    dist.barrier()


_worlds: dict[int, World] = {}


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Connection(os.dup(sys.stdin.fileno())))
