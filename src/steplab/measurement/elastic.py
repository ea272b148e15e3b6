"""The process that starts several, by torch's elastic launcher, on this machine.

Started by ranks_launch.py as `python -m steplab.measurement.elastic`, with an order on standard input, which stays open
for as long as the parent lives. Each rank runs rank.py. Nothing is started anew: the first that ends badly ends all.
"""

import os
import signal
import sys
import threading

import msgspec

from steplab.errors import SteplabError
from steplab.measurement.channel import HUB_VARIABLE, Channel
from steplab.measurement.hub import LAUNCHER


class Order(msgspec.Struct):
    """What the parent wants started."""

    processes: int
    device: str
    """cuda, cpu or auto."""
    port: int
    """Of the parent's hub, on this machine."""
    token: str
    logs: str
    """Folder for what the ranks write to their standard streams."""


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    channel = Channel("127.0.0.1", order.port, order.token, LAUNCHER)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A core is for one rank; torch would give each rank all of them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // order.processes)))
    os.environ[HUB_VARIABLE] = f"{order.port}:{order.token}"
    try:
        exits = _launch(order)
    except SteplabError as error:
        channel.send("refused", [error.exit_code, str(error)])
    else:
        channel.send("exits", exits)


def _launch(order: Order) -> dict[int, int]:
    """Start the ranks, wait for them, and give the exit codes of those that ended badly; negative: by which signal."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check_gpus(order)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order.processes,
        run_id="steplab",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=order.logs, redirects=Std.ALL),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "steplab.measurement.rank")
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _check_gpus(order: Order) -> None:
    import torch

    from steplab.measurement.world import refuse_too_few_gpus

    if order.device == "cuda" and not torch.cuda.is_available():
        from steplab.measurement.device import open_device

        open_device("cuda")  # says why there is none
    if order.device != "cpu" and torch.cuda.is_available():
        refuse_too_few_gpus(order.processes, torch.cuda.device_count())


def _end_with_parent() -> None:
    """Wait for the end of standard input; the ranks hear it from their own connections."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
