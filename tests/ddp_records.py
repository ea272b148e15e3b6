import random
from collections.abc import Sequence
from typing import Any

from tests.runs import ENVIRONMENT

from steplab.costs.data_parallel import Link
from steplab.lab.ddp import overhead_model, with_expected
from steplab.records import ddp
from steplab.records.failure import Failure
from steplab.records.memory import PeakMemory
from steplab.records.profile import Timeline
from steplab.records.record import RankPlace
from steplab.records.timing import PhaseSamples
from steplab.specs.ddp import KINDS, DdpStudy, Variant, variants_of
from steplab.specs.resolve import resolve_step

LINK = Link(bytes_per_s=300e9, call_s=20e-6)
PARAMETERS, TENSORS = 2_000_000_000, 435
BYTES = 4 * PARAMETERS
PHASES = {"forward": 0.062, "backward": 0.132, "gradient sync": 0.0, "optimizer": 0.016}
RANKS = 2
STATES = {"sharded": RANKS, "fsdp2": RANKS}


def make_study(names: Sequence[str] = KINDS, **fields: Any) -> DdpStudy:
    step = resolve_step({"model": "xl", "context": 512, "precision": "bf16", "device": "cuda"})
    return DdpStudy(step=step, processes=RANKS, contenders=variants_of(names, (1.0, 10.0, 100.0, 1000.0)), **fields)


def make_ddp_run(names: Sequence[str] = KINDS, *, broken: Sequence[str] = (), **fields: Any) -> ddp.DdpRun:
    study = make_study(names)
    facts = ddp.DdpFacts(
        backend="nccl",
        places=tuple(RankPlace(rank=rank, host="node", device="NVIDIA H200") for rank in range(RANKS)),
        num_parameters=PARAMETERS,
        num_tensors=TENSORS,
        gradient_bytes=BYTES,
    )
    cells = [with_expected(make_ddp_cell(c, broken=c.kind in broken), study, facts) for c in study.contenders]
    values: dict[str, Any] = {
        "id": f"{random.Random(repr((names, broken))).getrandbits(48):012x}",
        "created_utc": "2026-11-21T07:30:00Z",
        "steplab_version": "0.1.0",
        "study": study,
        "environment": ENVIRONMENT,
        "facts": facts,
        "cells": tuple(cells),
        "model": overhead_model(cells, facts),
    }
    return ddp.DdpRun(**(values | fields))


def num_buckets(contender: Variant) -> int:
    if contender.bucket_size_mb is None:
        return {"none": 0, "flat": 1}.get(contender.kind, TENSORS)
    return min(max(round(BYTES / 1e6 / contender.bucket_size_mb), 1), TENSORS)


def make_ddp_cell(contender: Variant, *, broken: bool = False) -> ddp.DdpCell:
    if broken:
        failure = Failure(kind="out_of_memory", message="asked for 8.00 GiB more (rank 1)", phase="warmup")
        return ddp.DdpCell(contender=contender, failure=failure)
    rng, calls = random.Random(contender.label), num_buckets(contender)
    alone_s = LINK.alone_s(BYTES, calls) if calls else 0.0
    left_s = LINK.exposed_s(BYTES, calls, PHASES["backward"]) if calls else 0.0
    if contender.kind in ("naive", "flat"):
        left_s = alone_s

    def ranks(extra_s: float) -> dict[str, list[float]]:
        times = PHASES | {"gradient sync": extra_s}
        columns = {name: [seconds * rng.uniform(1, 1.02) for _ in range(10)] for name, seconds in times.items()}
        return columns | {"step": [sum(parts) for parts in zip(*columns.values(), strict=True)]}

    def samples(columns: dict[str, list[float]]) -> tuple[PhaseSamples, ...]:
        kept = {name: column for name, column in columns.items() if any(column)}
        return tuple(PhaseSamples(phase=name, device_s=tuple(column)) for name, column in kept.items())

    return ddp.DdpCell(
        contender=contender,
        ranks=tuple(
            ddp.DdpRank(
                rank=rank,
                phases=samples(ranks(left_s)),
                baseline=samples(ranks(0.0)) if calls else (),
                alone_s=tuple(alone_s * rng.uniform(1, 1.01) for _ in range(10)) if calls else (),
                memory=_memory(contender),
                peak=PeakMemory(phase="step", peak_allocated_bytes=9 * BYTES, peak_reserved_bytes=10 * BYTES),
                beside_bytes=3 * BYTES,
            )
            for rank in range(RANKS)
        ),
        messages=(ddp.Messages(collective="all_reduce", sizes_bytes=(BYTES // calls,) * calls),) if calls else (),
        turns="interleaved" if calls else "",
        first_step_s=1.5,
        traced=_traced(alone_s, left_s),
        notes=("communication alone: not timed",) if contender.kind == "fsdp2" else (),
    )


def _memory(contender: Variant) -> tuple[ddp.StateMemory, ...]:
    whole = BYTES // (RANKS if contender.kind == "fsdp2" else 1)
    state = 2 * BYTES // STATES.get(contender.kind, 1)
    held = zip(ddp.MOMENTS, ((0, 0), (whole, 0), (whole, state)), strict=True)
    return tuple(
        ddp.StateMemory(
            moment=moment,
            parameters_bytes=whole,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            allocated_bytes=whole + gradients + optimizer + 10**8,
        )
        for moment, (gradients, optimizer) in held
    )


def _traced(alone_s: float, left_s: float) -> ddp.TracedSteps:
    forward, backward = round(PHASES["forward"] * 1e9), round(PHASES["backward"] * 1e9)
    end = forward + backward
    sent = round(alone_s * 1e9)
    begin = end + round(left_s * 1e9) - sent
    work = [("matmul", ddp.COMPUTE_ROW, 0, forward), ("matmul", ddp.COMPUTE_ROW, forward, backward)]
    work += [("communication", ddp.COMMUNICATION_ROW, begin, sent)] if sent else []
    return ddp.TracedSteps(
        num_steps=2,
        step_s=(end + max(begin + sent - end, 0)) / 1e9,
        communication_s=alone_s,
        overlapped_s=alone_s - left_s if alone_s else 0.0,
        timeline=Timeline(
            names=("matmul", "communication"),
            categories=("matmul", "communication"),
            kernel=tuple(0 if name == "matmul" else 1 for name, *_ in work),
            stream=tuple(row for _, row, _, _ in work),
            start_ns=tuple(start for _, _, start, _ in work),
            duration_ns=tuple(lasts for *_, lasts in work),
            phases=(("forward", 0, forward), ("backward", forward, end)),
        ),
    )
