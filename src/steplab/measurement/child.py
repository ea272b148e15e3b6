"""The measuring process: one request in on standard input, messages out on a pipe, the record last.

Started by launch.py as `python -m steplab.measurement.child FD`. A request names a step to measure or to audit, cells
of a benchmark of attention or of collectives, tiles to be tuned, or a device whose ceilings are wanted. Standard input
stays open for as long as the parent lives: when it ends, however the parent died, this process ends too and frees the
GPU.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from steplab.errors import SteplabError
from steplab.measurement.messages import Request
from steplab.records.codec import encode
from steplab.records.environment import Environment
from steplab.records.run import Run
from steplab.specs.ddp import DdpStudy

if TYPE_CHECKING:
    from steplab.measurement.watcher import Watch
    from steplab.measurement.world import World

_STEP_MESSAGES_EVERY_S = 0.1


def main() -> None:
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    threading.Thread(target=end_with_parent, daemon=True).start()

    def send(kind: str, value: Any) -> None:
        pipe.write(encode({"kind": kind, "value": value}) + b"\n")

    try:
        answer(request, send)
    except SteplabError as error:
        send("refused", [error.exit_code, str(error)])


def answer(
    request: Request, send: Callable[[str, Any], None], world: "World | None" = None, folder: str | None = None
) -> None:
    """Do what is asked for, and send what happens and, last, the result; in a world every rank does so.

    `folder` is one of the world's own, for files that nobody keeps.
    Raises SteplabError for a request that cannot be served.
    """
    last_sent_s = 0.0

    def on_step(iteration: int) -> None:
        nonlocal last_sent_s
        now_s = time.monotonic()
        if now_s - last_sent_s >= _STEP_MESSAGES_EVERY_S:
            last_sent_s = now_s
            send("step", iteration + 1)

    def on_environment(environment: Environment) -> None:
        send("environment", environment)

    def on_stage(stage: str, num_steps: int) -> None:
        send("stage", [stage, num_steps])

    def on_measured(run: Run) -> None:
        send("measured", run)

    if request.attention is not None:
        from steplab.measurement import compat
        from steplab.measurement.attention_session import AttentionObserver, measure_attention_here

        compat.watch_refused_allocations()
        told = AttentionObserver(
            on_environment=on_environment,
            on_stage=on_stage,
            on_step=on_step,
            on_cells=lambda cells: send("at", cells),
            on_result=lambda cell, result: send("cell", [cell, result]),
        )
        send("end", measure_attention_here(request.attention, request.groups, told))
    elif request.tuning is not None:
        from steplab.measurement.attention_tuning import tune_here

        send("tuned", tune_here(request.tuning, on_stage, on_step))
    elif request.comm is not None and world is not None:
        from steplab.measurement.comm_session import CommObserver, measure_comm_here

        watching = CommObserver(
            on_environment=on_environment,
            on_stage=on_stage,
            on_cell=lambda cell: send("at", cell),
            on_result=lambda cell, result: send("cell", [cell, result]),
        )
        send("record", measure_comm_here(request.comm, request.cells, world, watching))
    elif request.ddp is not None and world is not None:
        _ddp(request.ddp, request, world, send, on_environment, on_stage, on_step)
    elif request.numerics:
        from steplab.measurement import compat
        from steplab.measurement.precision_session import numerics_here
        from steplab.measurement.session import Observer

        compat.watch_refused_allocations()
        observer = Observer(on_environment=on_environment, on_stage=on_stage)
        send("record", numerics_here(request.step, request.device, observer))
    elif request.step is not None:
        from steplab.measurement import compat
        from steplab.measurement.session import Observer, measure_here

        compat.watch_refused_allocations()
        observer = Observer(on_environment=on_environment, on_stage=on_stage, on_step=on_step, on_measured=on_measured)
        send("record", measure_here(request.step, observer, _watch(request, world, folder), world))
    else:
        from steplab.measurement.ceilings import measure_ceilings_here

        send("record", measure_ceilings_here(request.device, on_stage))


def _ddp(
    study: DdpStudy,
    request: Request,
    world: "World",
    send: Callable[[str, Any], None],
    on_environment: Callable[[Environment], None],
    on_stage: Callable[[str, int], None],
    on_step: Callable[[int], None],
) -> None:
    from steplab.measurement import compat
    from steplab.measurement.ddp_session import DdpObserver, ddp_here

    compat.watch_refused_allocations()
    told = DdpObserver(
        on_environment=on_environment,
        on_stage=on_stage,
        on_step=on_step,
        on_facts=lambda facts: send("facts", facts),
        on_contender=lambda number: send("at", number),
        on_cell=lambda number, cell: send("cell", [number, cell]),
    )
    ddp_here(study, request.contenders, world, told, Path(request.traces) if request.traces else None)
    send("end", True)


def _watch(request: Request, world: "World | None", folder: str | None) -> "Watch | None":
    from steplab.measurement.memory_recorder import MemoryWatch
    from steplab.measurement.profiler import Profiling

    def place(path: str) -> Path:
        """All ranks are watched, so that all take the same steps; what the first one sees is kept."""
        if world is None or world.rank == 0:
            return Path(path)
        assert folder is not None  # torchrun's ranks are not watched
        return Path(folder) / f"{world.rank}.{Path(path).name}"

    if request.snapshot and request.marks:
        return MemoryWatch(snapshot=place(request.snapshot), marks=place(request.marks))
    if not request.profiled_steps:
        return None
    return Profiling(num_steps=request.profiled_steps, trace=place(request.trace) if request.trace else None)


def end_with_parent() -> None:
    """Wait for the end of standard input (by its descriptor: a daemon thread must hold no lock of Python's)."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)  # the whole session: what the model started is to end as well


if __name__ == "__main__":
    main()
