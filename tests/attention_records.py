import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.runs import ENVIRONMENT

from steplab.costs.operators import attention_flops
from steplab.records.attention import AttentionCell, AttentionMemory, AttentionRun, TensorError
from steplab.records.failure import Failure
from steplab.records.timing import PhaseSamples
from steplab.specs.attention import AttentionSpec, AttentionStudy, cells_of, cells_of_grid

RATES = {"plain": 60e12, "sdpa_flash": 300e12, "flex": 400e12, "sdpa_cudnn": 500e12, "flash_triton": 450e12}
LARGEST_PLAIN = 8 * 8192**2


def make_cell(spec: AttentionSpec, **overrides: Any) -> AttentionCell:
    rng = random.Random(repr(spec))
    flops = attention_flops(spec)
    rate = RATES.get(spec.implementation, 100e12) * (2 if spec.compile != "off" else 1)
    scores = spec.batch * spec.heads * spec.queries * spec.num_keys
    failure = None
    passes = ["forward", "backward", "both"]
    if spec.implementation == "plain" and scores > LARGEST_PLAIN:
        passes = ["forward"]
        failure = Failure(
            kind="out_of_memory",
            message="asked for 64.0 GiB more, with at most 100 GiB in tensors before (backward)",
            phase="backward",
            requested_bytes=64 * 1024**3,
        )
    output_bytes = spec.batch * spec.heads * spec.queries * spec.dim * 2
    kept = output_bytes + (2 * scores if spec.implementation == "plain" else 4 * scores // spec.num_keys)
    values: dict[str, Any] = {
        "spec": spec,
        "passes": tuple(
            PhaseSamples(
                phase=name, device_s=tuple((flops[name] / rate + 4e-6) * rng.uniform(1, 1.1) for _ in range(9))
            )
            for name in passes
        ),
        "first_call_s": 1.5,
        "memory": AttentionMemory(
            saved_bytes=None if failure else kept,
            forward_peak_bytes=2 * kept,
            both_peak_bytes=None if failure else 3 * kept,
        ),
        "errors": tuple(
            TensorError(
                tensor=tensor,
                max_abs=4e-3 * rng.uniform(1, 1.2),
                relative=2e-3 * rng.uniform(1, 1.2),
                plain_max_abs=4e-3,
                plain_relative=2e-3,
            )
            for tensor in ("output", "queries", "keys", "values")
        )
        if not failure
        else (),
        "checked_heads": None if failure else spec.batch * spec.heads,
        "flops": flops,
        "failure": failure,
    }
    return AttentionCell(**(values | overrides))


def make_benchmark(
    grid: str | None = None, lists: Mapping[str, Sequence[object]] | None = None, **overrides: Any
) -> AttentionRun:
    description = ""
    if grid:
        name, description, cells = cells_of_grid(grid, lists or {}, {"implementation": list(RATES)})
    else:
        name, cells = "attention", cells_of([{"implementation": list(RATES)} | dict(lists or {})])
    study = AttentionStudy(name=name, description=description, cells=cells)
    values: dict[str, Any] = {
        "id": f"{random.Random(repr(study)).getrandbits(48):012x}",
        "created_utc": "2026-11-21T16:00:00Z",
        "steplab_version": "0.1.0",
        "study": study,
        "environment": ENVIRONMENT,
        "cells": tuple(make_cell(cell) for cell in study.cells),
    }
    return AttentionRun(**(values | overrides))
