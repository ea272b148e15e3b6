"""This process as one of several that measure a step together."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from steplab.errors import Unsupported, UserError
from steplab.measurement.machine.device import Device, open_device
from steplab.measurement.machine.torchrun import LOOPBACK, ProcessPlace, Torchrun
from steplab.parallel.collectives import Collectives, GroupCollectives

JOIN_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 1800.0
"""Last resort; processes.conversation notices a dead or hanging rank sooner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    rank: int
    size: int
    host: str
    device: Device
    backend: str
    collectives: Collectives
    folder: Path | None = None
    """Private folder for temporary files; None under torchrun."""

    def leave(self) -> None:
        dist.destroy_process_group()


def meeting_place(around: Torchrun) -> Store:
    """The store that all processes of torchrun reach; each call gets its own keys. Raises UserError if this process
    cannot serve it.
    """
    store = _store_of(around)
    arrivals = PrefixStore("steplab/", store).add(f"arrivals/{around.rank}", 1)
    return PrefixStore(f"steplab/{arrivals}/", store)


@cache
def _store_of(around: Torchrun) -> Store:
    """Connect to the store; the first process serves it, unless the launcher does."""
    serves = around.is_first and not around.agent_store
    address, listening = around.address, None
    if around.is_on_one_machine and not around.agent_store:
        # torch would listen on all interfaces and trust every client
        address = LOOPBACK
        listening = _listening_at(around.port) if serves else None
    return TCPStore(
        address,
        around.port,
        around.size,
        is_master=serves,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening,
    )


def private_meeting_place(folder: str, size: int) -> Store:
    """A file as store. Raises FileNotFoundError if the folder is gone: torch would wait for it with Python's
    lock held.
    """
    os.stat(folder)
    store = FileStore(f"{folder}/store", size)
    store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
    return store


def _listening_at(port: int) -> int:
    try:
        return socket.create_server((LOOPBACK, port), backlog=1024).detach()
    except OSError as error:
        raise UserError(f"cannot listen on MASTER_PORT {port}: {error.strerror}; choose another port") from None


def join_world(place: ProcessPlace, device: str, meet: Callable[[], Store], *, folder: str | None = None) -> World:
    """Join the group of processes, on this rank's own GPU or on the CPU (`device`: auto, cuda or cpu); gloo carries CPU
    values, nccl GPU tensors. Raises Unsupported without a GPU for this rank, and UserError in a program that already
    has a process group.
    """
    if dist.is_initialized():
        raise UserError(
            "this program is in a process group; call torch.distributed.destroy_process_group before steplab measures"
        )
    opened = _open_share(place, device)
    backend = "nccl" if opened.torch_device.type == "cuda" else "gloo"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=meet(),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return World(
        rank=place.rank,
        size=place.size,
        host=socket.gethostname(),
        device=opened,
        backend=backend,
        collectives=GroupCollectives(),
        folder=Path(folder) if folder else None,
    )


def _open_share(place: ProcessPlace, device: str) -> Device:
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device '{device}' cannot be shared by several processes; choose one of auto, cpu, cuda")
    if device == "cpu" or not torch.cuda.is_available():
        return open_device("cuda" if device == "cuda" else "cpu")  # cuda raises with the reason
    refuse_too_few_gpus(place.local_size, torch.cuda.device_count())
    return open_device(f"cuda:{place.local_rank}")


def refuse_too_few_gpus(wanted: int, there: int) -> None:
    """Raise Unsupported if processes would share a GPU, which NCCL does not support."""
    if wanted > there:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f" (CUDA_VISIBLE_DEVICES is '{visible}')" if visible is not None else ""
        raise Unsupported(
            f"{wanted} processes on GPUs of one machine",
            f"each takes one, and {socket.gethostname()} has {there}{seen}",
            f"use at most {there}" if there else "use --processes on the CPU",
        )
