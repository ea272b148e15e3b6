import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.runs import ENVIRONMENT

from steplab.costs.communication import bus_factor, wire_bytes
from steplab.lab.comm import profile_of
from steplab.records.comm import CommCell, CommCheck, CommRun, RankTimes
from steplab.records.failure import Failure
from steplab.records.record import RankPlace
from steplab.specs.comm import CommSpec, CommStudy, comm_cells

ALPHA_S = {"nccl": 25e-6, "gloo": 300e-6, "peer_copy": 60e-6}
BANDWIDTH = {"nccl": 340e9, "gloo": 2e9, "peer_copy": 370e9}
REPEATS = 9


def make_comm_cell(spec: CommSpec, **overrides: Any) -> CommCell:
    rng = random.Random(repr(spec))
    wire = spec.message_bytes * bus_factor(spec.collective, spec.world_size)
    time_s = ALPHA_S[spec.backend] + wire / BANDWIDTH[spec.backend]

    def samples(rank: int, factor: float = 1.0) -> tuple[float, ...]:
        slow = 1.02 if rank == 1 else 1.0
        return tuple(factor * slow * time_s * rng.uniform(1, 1.01) for _ in range(REPEATS))

    on_gpu = spec.device == "cuda"
    values: dict[str, Any] = {
        "spec": spec,
        "message_bytes": spec.message_bytes,
        "wire_bytes": wire_bytes(spec),
        "ranks": tuple(
            RankTimes(
                rank=rank,
                device_s=samples(rank) if on_gpu else None,
                num_waits=0 if on_gpu else None,
                alone_s=samples(rank, 1.5 if on_gpu else 1.0),
            )
            for rank in range(spec.world_size)
        ),
        "check": CommCheck(num_elements=spec.message_elements * spec.world_size, num_wrong=0),
    }
    return CommCell(**(values | overrides))


def make_failure(spec: CommSpec) -> CommCell:
    failure = Failure(kind="out_of_memory", message="rank 1 on node1: asked for 1.00 GiB more (buffers)", rank=1)
    return make_comm_cell(spec, ranks=(), check=None, failure=failure)


def make_comm(lists: Mapping[str, Sequence[object]] | None = None, *, ranks: int = 4, **overrides: Any) -> CommRun:
    on_gpus = "nccl" in (lists or {}).get("backend", ["nccl"])
    cells = comm_cells(lists or {}, num_processes=ranks, on_gpus=on_gpus)
    measured = tuple(make_comm_cell(cell) for cell in cells)
    values: dict[str, Any] = {
        "id": f"{random.Random(repr(cells)).getrandbits(48):012x}",
        "created_utc": "2026-11-21T18:00:00Z",
        "steplab_version": "0.1.0",
        "study": CommStudy(cells=cells, num_processes=ranks),
        "environment": ENVIRONMENT,
        "ranks": tuple(
            RankPlace(rank=rank, host=f"node{1 + rank // 2}", device=f"cuda:{rank % 2} NVIDIA H200")
            for rank in range(ranks)
        ),
        "libraries": {"nccl": "2.28.9"},
        "cells": measured,
        "profile": profile_of(measured),
    }
    return CommRun(**(values | overrides))


def failing() -> CommRun:
    lists: dict[str, Sequence[object]] = {
        "collective": ["all_reduce", "send_recv"],
        "size": ["1MB", "100MB"],
        "world_size": [2],
    }
    run = make_comm(lists, ranks=2, id="c0ffee000001")
    cells = [make_failure(cell.spec) if index == 2 else cell for index, cell in enumerate(run.cells)]
    even = tuple(times for times in cells[0].ranks)
    cells[0] = make_comm_cell(cells[0].spec, ranks=(even[0], even[0]))
    cells[1] = make_comm_cell(cells[1].spec, ranks=(cells[1].ranks[0], cells[1].ranks[0]))
    return make_comm(lists, ranks=2, id="c0ffee000001", cells=tuple(cells), profile=profile_of(cells))


def told_benchmarks() -> list[CommRun]:
    lists: dict[str, Sequence[object]] = {"collective": ["all_reduce"], "size": ["1MB", "10MB", "100MB"]}
    return [failing(), make_comm(lists | {"world_size": [2, 4]}, id="c0ffee000002")]
