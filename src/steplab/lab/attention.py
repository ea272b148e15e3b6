"""Benchmark attention, and explain cells that ran out of memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from steplab.costs.operators import attention_flops
from steplab.errors import UserError
from steplab.lab.benchmark import Measuring, measure_benchmark
from steplab.lab.keeping import open_store
from steplab.lab.machine import visible_gpus
from steplab.measurement.processes.launch import Cells
from steplab.measurement.progress import OnProgress
from steplab.ops.attention.implementations import TABLE
from steplab.plan.attention_memory import account_of_failure, smallest_that_does_not_fit
from steplab.records.attention import AttentionAccount, AttentionCell, AttentionRun
from steplab.records.codec import new_head
from steplab.specs.attention import ATTENTION, PASSES, AttentionSpec, AttentionStudy, cells_of, cells_of_grid
from steplab.specs.benchmark import sampling
from steplab.specs.hardware import hardware_named
from steplab.specs.resolve import as_grid
from steplab.units import parse_duration


def attention(
    grid: str | None = None,
    *,
    name: str = "",
    store: Path | str | None = None,
    timeout_s: float = parse_duration(ATTENTION.timeout),
    on_progress: OnProgress = lambda progress: None,
    **fields: object,
) -> AttentionRun:
    """Benchmark attention alone, as `steplab attention` does, and store the record.

    `fields` of a cell (batch, heads, kv_heads, sequence, queries, keys, dim, causal, dtype, implementation, compile)
    are values or lists; every combination is a cell. They replace the `grid`'s:

        run = steplab.attention(sequence=[64, 128], dim=32, implementation=["plain", "sdpa"])
        steplab.show(run)

    Without either, the default grid for the device is measured. Further fields are the command's passes, device,
    repeats, errors and seed. `timeout_s` limits a cell's time without progress. Raises UserError for an unsupported
    request, SteplabError if the store cannot be written.
    """
    study = attention_study({"grid": grid, **fields})
    return measure_attention(study, name=name, store=store, timeout_s=timeout_s, on_progress=on_progress)


def measure_attention(study: AttentionStudy, **how: Unpack[Measuring]) -> AttentionRun:
    """Measure the study and store its record; keywords and errors are as in `measure_benchmark`."""
    return measure_benchmark(
        AttentionRun(**new_head(), study=study),
        attention_cells(study),
        with_costs=lambda cell: dataclasses.replace(cell, flops=attention_flops(cell.spec)),
        **how,
    )


def attention_cells(study: AttentionStudy) -> Cells[AttentionCell]:
    numbers = {cell: number for number, cell in enumerate(study.cells)}
    return Cells(
        job="attention",
        study=study,
        labels=[cell.label for cell in study.cells],
        failed=lambda number, failure: AttentionCell(spec=study.cells[number], failure=failure),
        groups=[[numbers[cell] for cell in group] for group in study.groups()],
        device=study.device,
    )


def account_for_memory(
    cells: Sequence[AttentionSpec], hardware: str | None, *, store: Path | str | None = None
) -> AttentionAccount:
    """Tensor sizes of the smallest plain attention that runs out of memory: among `cells` on the GPU `hardware`, or, if
    that is None, in the newest stored benchmark in which one did. Raises UserError without one.
    """
    if hardware is not None:
        spec = hardware_named(hardware)
        memory_bytes = spec.usable_bytes or spec.memory_bytes
        return smallest_that_does_not_fit(cells, memory_bytes, spec.name, backward=True)
    with open_store(store, write=False) as opened:
        for row in opened.rows(kind="attention"):
            run = opened.get(str(row["id"]))
            memory = run.environment.device.memory_bytes if isinstance(run, AttentionRun) and run.environment else None
            if isinstance(run, AttentionRun) and memory and run.device_name:
                account = account_of_failure(run.cells, memory, f"{run.device_name} (record {run.id})")
                if account:
                    return account
    raise UserError(
        "plain attention ran out of memory in no stored benchmark; name a GPU to compute it for: "
        '--derive --gpu "H200 SXM"'
    )


def attention_study(given: Mapping[str, object]) -> AttentionStudy:
    """The benchmark of a grid, of given cell fields, or both; by default the device's grid. Raises UserError with the
    valid values.
    """
    fields, asked = ATTENTION.asked(given)
    on_gpu = asked.device.startswith("cuda") or (asked.device == "auto" and visible_gpus() > 0)
    lists = as_grid(fields)
    defaults = {"implementation": [row.name for row in TABLE if ("cuda" if on_gpu else "cpu") in row.benchmarked_on]}
    if source := asked.grid or (None if lists else "peers" if on_gpu else "tiny"):
        name, description, cells = cells_of_grid(source, lists, defaults)
    else:
        name, description = "attention", ""
        cells = cells_of([{**defaults, "dtype": ["bf16" if on_gpu else "fp32"], **lists}])
    unknown = [name for name in asked.passes if name not in PASSES]
    if unknown or not asked.passes:
        raise UserError(f"pass '{''.join(unknown[:1])}' is not known; choose some of {', '.join(PASSES)}")
    return AttentionStudy(
        name=name,
        description=description,
        cells=cells,
        passes=tuple(name for name in PASSES if name in asked.passes),
        device=asked.device,
        errors=asked.errors,
        seed=asked.seed,
        **sampling(asked.repeats),
    )
