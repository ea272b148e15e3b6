"""Benchmark attention: measure a study's cells, store them as one record, and explain cells that ran out of memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from steplab.costs.operators import attention_flops
from steplab.errors import UserError
from steplab.lab.benchmark import Measuring, measure_benchmark
from steplab.lab.keeping import open_store
from steplab.lab.machine import visible_gpus
from steplab.measurement.processes.cells_launch import Cells
from steplab.measurement.progress import OnProgress
from steplab.ops.attention.implementations import TABLE
from steplab.plan.attention_memory import account_of_failure, smallest_that_does_not_fit
from steplab.records.attention import AttentionAccount, AttentionCell, AttentionRun
from steplab.records.codec import new_head
from steplab.specs.attention import PASSES, AttentionSpec, AttentionStudy, cells_of, cells_of_grid
from steplab.specs.hardware import hardware_named
from steplab.specs.layout import check_device
from steplab.specs.study import as_grid

DEFAULT_TIMEOUT_S = 600.0


def attention(
    grid: str | None = None,
    *,
    passes: Sequence[str] = PASSES,
    device: str = "auto",
    repeats: int | None = None,
    errors: bool = True,
    seed: int = 0,
    name: str = "",
    store: Path | str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress = lambda progress: None,
    **fields: object,
) -> AttentionRun:
    """Benchmark attention by itself, as `steplab attention` does, and store the record.

    `fields` are those of a cell (batch, heads, kv_heads, sequence, queries, keys, dim, causal, dtype, implementation,
    compile), each a value or a list; every combination is a cell, and they replace those of the `grid`:

        run = steplab.attention(sequence=[64, 128], dim=32, implementation=["plain", "sdpa"])
        steplab.show(run)

    Without either, the default grid for the device is measured. `timeout_s` is how long one cell may go without
    progress. Raises UserError for a request that is not supported, and SteplabError if the store cannot be written.
    """
    study = attention_study(
        grid, as_grid(fields), pass_=passes, device=device, repeats=repeats, errors=errors, seed=seed
    )
    return measure_attention(study, name=name, store=store, timeout_s=timeout_s, on_progress=on_progress)


def measure_attention(study: AttentionStudy, **how: Unpack[Measuring]) -> AttentionRun:
    """Measure a study's cells and store the record; an interrupted study is stored with the cells that had ended.

    Raises UserError for a request that is not supported, and SteplabError if the store cannot be written.
    """
    return measure_benchmark(
        AttentionRun(**new_head(), study=study),
        attention_cells(study),
        with_costs=lambda cell: dataclasses.replace(cell, flops=attention_flops(cell.spec)),
        **how,
    )


def attention_cells(study: AttentionStudy) -> Cells[AttentionCell]:
    """The study's cells; cells of one shape are timed in turns."""
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
    """The tensors of the smallest plain attention that runs out of memory.

    With `hardware`, a name of the catalogue, it is computed for these shapes; without, it comes from the newest stored
    benchmark in which plain attention ran out of memory. Raises UserError if there is none.
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


def attention_study(
    grid: str | None,
    lists: Mapping[str, Sequence[object]],
    *,
    pass_: Sequence[str] = PASSES,
    device: str = "auto",
    repeats: int | None = None,
    errors: bool = True,
    seed: int = 0,
) -> AttentionStudy:
    """The benchmark described by a grid, lists of fields, or both; without either, the default one for the device.

    Raises UserError that names what was given and what is valid.
    """
    check_device(device)
    on_gpu = device.startswith("cuda") or (device == "auto" and visible_gpus() > 0)
    description = ""
    source = grid or (("peers" if on_gpu else "tiny") if not lists else None)
    given = dict(lists)
    names = [str(name) for name in given.get("implementation", ())] or [
        row.name for row in TABLE if ("cuda" if on_gpu else "cpu") in row.benchmarked_on
    ]
    if source is not None:
        name, description, cells = cells_of_grid(source, given, {"implementation": names})
    else:
        name, cells = (
            "attention",
            cells_of([{"implementation": names, "dtype": ["bf16" if on_gpu else "fp32"]} | given]),
        )
    unknown = [name for name in pass_ if name not in PASSES]
    if unknown or not pass_:
        raise UserError(f"pass '{''.join(unknown[:1])}' is not known; choose some of {', '.join(PASSES)}")
    counts = {} if repeats is None else {"least_repeats": repeats, "most_repeats": repeats}
    return AttentionStudy(
        name=name,
        description=description,
        cells=cells,
        passes=tuple(name for name in PASSES if name in pass_),
        device=device,
        errors=errors,
        seed=seed,
        **counts,
    )
