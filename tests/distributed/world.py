"""Several ranks on this machine's CPU, started once for a file of tests, that run named cases one after the other.

A test file has functions marked with its `Cases`, and hands them to pytest with `cases.run(world_size, subtests)`. Each
case gets a process group of its own, so that one that fails or hangs leaves the next a clean start.
"""

import importlib
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CASE_TIMEOUT_S = 30
"""After this long a collective that waits for another rank raises."""
WORLD_TIMEOUT_S = 240
"""After this long all that is left of a world is ended."""


class Cases:
    """The cases of one test file, by name; each is a function without arguments that every rank calls."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.functions: dict[str, Callable[[], None]] = {}
        self.small: set[str] = set()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.functions[function.__name__] = function
        return function

    def in_a_small_world(self, function: Callable[[], None]) -> Callable[[], None]:
        """For a case that has little to do with how many ranks there are: it runs on two alone."""
        self.small.add(function.__name__)
        return self(function)

    def run(self, size: int, subtests: Any) -> None:
        """All cases on that many ranks; each that fails anywhere fails as a subtest of its name."""
        names = [name for name in self.functions if size == 2 or name not in self.small]
        problems = run_world(self.module, names, size)
        for name, found in problems.items():
            with subtests.test(msg=name):
                assert not found, "\n".join(found)


def run_world(
    module: str,
    names: list[str],
    size: int,
    timeout_s: float = WORLD_TIMEOUT_S,
    case_timeout_s: float = CASE_TIMEOUT_S,
) -> dict[str, list[str]]:
    """For each case, what went wrong on which rank; `module` has the `Cases` under the name `cases`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])  # imported once for all ranks
    problems: dict[str, list[str]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(module, names, case_timeout_s, rank, size, folder, there), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        for rank, pipe in enumerate(pipes):
            for name in names:
                problem = _receive(pipe, deadline)
                if problem:
                    problems[name].append(f"on rank {rank} of {size}: {problem}")
        for process in processes:
            process.join(max(deadline - time.monotonic(), 1))
            process.kill()
    return problems


def _receive(pipe: Connection, deadline: float) -> str | None:
    if not pipe.poll(max(deadline - time.monotonic(), 0)):
        return "nothing was heard of this case in time: it hangs, or one before it does"
    try:
        return str(pipe.recv())
    except EOFError:
        return "the process has died in this case or before it"


def _rank(module: str, names: list[str], timeout_s: float, rank: int, size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    functions = importlib.import_module(module).cases.functions
    for name in names:
        store = dist.FileStore(str(Path(folder, name)), size)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
            torch.manual_seed(0)
            functions[name]()
            dist.barrier()
            problem = ""
        except BaseException:  # reported by name; the next case runs all the same
            problem = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(problem)
