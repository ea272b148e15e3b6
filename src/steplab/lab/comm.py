"""Benchmark collectives, and fit the communication profile."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from steplab.costs.communication import FEWEST_SIZES, Point, fit_line, wire_bytes
from steplab.errors import UserError
from steplab.lab.benchmark import Measuring, measure_benchmark
from steplab.lab.machine import processes_here, visible_gpus
from steplab.measurement.processes.launch import Cells, refuse_too_many
from steplab.measurement.progress import OnProgress
from steplab.records.codec import new_head
from steplab.records.comm import CommCell, CommFit, CommRun
from steplab.records.failure import Failure
from steplab.specs.benchmark import sampling
from steplab.specs.comm import COMM, CommSpec, CommStudy, comm_cells, numbers_of
from steplab.specs.resolve import as_grid
from steplab.units import format_time, parse_duration

_FEWEST = 2
_SETTLED = 1.5


def comm(
    *,
    name: str = "",
    store: Path | str | None = None,
    timeout_s: float = parse_duration(COMM.timeout),
    on_progress: OnProgress = lambda progress: None,
    **fields: object,
) -> CommRun:
    """Benchmark collectives, as `steplab comm` does, and store the record.

    `fields` are a cell's (collective, size, world_size, backend, device, dtype), each a value or a list:

        run = steplab.comm(processes=2, collective="all_reduce", size=["100kB", "1MB"])
        run.profile  # the fitted line of each collective

    Further fields are the command's gpus, processes and repeats. Without `gpus` or `processes` all GPUs take part, or
    two processes on the CPU. `timeout_s` limits a cell's time. Raises UserError for an unsupported request,
    SteplabError if the store cannot be written.
    """
    study, device = comm_study(fields)
    return measure_comm(study, device=device, name=name, store=store, timeout_s=timeout_s, on_progress=on_progress)


def comm_study(given: Mapping[str, object]) -> tuple[CommStudy, str]:
    """The study, and its device, cuda or cpu. Default processes: torchrun's, else one per GPU, or two on a CPU or a
    single GPU. Raises UserError with the valid values.
    """
    fields, asked = COMM.asked(given)
    numbers = numbers_of(asked.processes)
    count, device = _processes(asked.gpus, max(numbers, default=None))
    if len(numbers) > 1:
        fields = {"world_size": numbers, **fields}
    cells = comm_cells(as_grid(fields), num_processes=count, on_gpus=device == "cuda")
    return CommStudy(cells=cells, num_processes=count, **sampling(asked.repeats)), device


def _processes(gpus: int | None, processes: int | None) -> tuple[int, str]:
    found = visible_gpus()
    count, device = processes_here(gpus, processes, default=(found, "cuda") if found > 1 else (_FEWEST, "cpu"))
    if count < _FEWEST:
        option = "gpus" if gpus is not None else "processes"
        raise UserError(f"--{option} must be at least {_FEWEST}, not {count}: a collective needs two processes")
    refuse_too_many(count)  # before sizes are checked: their error would name the wrong cause
    return count, device


def measure_comm(study: CommStudy, *, device: str, **how: Unpack[Measuring]) -> CommRun:
    """Measure the study on `device`, cuda or cpu, and store it; keywords and errors are as in `measure_benchmark`."""
    return measure_benchmark(
        CommRun(**new_head(), study=study),
        collective_cells(study, device),
        with_costs=lambda cell: dataclasses.replace(cell, wire_bytes=wire_bytes(cell.spec)),
        with_facts=lambda run, facts: dataclasses.replace(run, ranks=facts.ranks, libraries=facts.libraries),
        concluded=with_profile,
        **how,
    )


def collective_cells(study: CommStudy, device: str) -> Cells[CommCell]:
    return Cells(
        job="comm",
        study=study,
        labels=[cell.label for cell in study.cells],
        failed=lambda number, failure: _failed(study.cells[number], failure),
        device=device,
        processes=study.num_processes,
    )


def _failed(spec: CommSpec, failure: Failure) -> CommCell:
    return CommCell(spec=spec, message_bytes=spec.message_bytes, failure=failure)


def with_profile(run: CommRun) -> CommRun:
    profile = profile_of(run.cells)
    notes = (*_waits(run.cells), *map(_why_left_out, left_out(run.cells)), *_why_no_line(run.cells, profile))
    return dataclasses.replace(run, profile=profile, notes=(*run.notes, *notes))


def _why_left_out(cell: CommCell) -> str:
    thirds_s = cell.slowest.thirds_s if cell.slowest else ()
    return (
        f"{cell.spec.label}: call times did not settle (medians of the first, middle and last third: "
        f"{', '.join(map(format_time, thirds_s))}), so the communication profile leaves this cell out"
    )


def _waits(cells: Sequence[CommCell]) -> Iterator[str]:
    for cell in cells:
        waiting = max(cell.ranks, key=lambda times: times.num_waits or 0, default=None)
        if waiting and waiting.num_waits:
            yield (
                f"{cell.spec.label}: in {waiting.num_waits} of {len(waiting.best_s)} samples of rank {waiting.rank} "
                "the device may have waited for Python, which had not started all of their calls"
            )


def _why_no_line(cells: Sequence[CommCell], profile: Sequence[CommFit]) -> list[str]:
    has_one = {(fit.collective, fit.way, fit.dtype, fit.world_size) for fit in profile}
    asked = dict.fromkeys(_line_of(cell.spec) for cell in cells if cell.slowest is not None)
    without = [f"{line[0]} ({', '.join(line[1:3])}, {line[3]} ranks)" for line in asked if line not in has_one]
    if not without:
        return []
    lacks = f"has no line for {', '.join(without)}" if profile else "is empty"
    return [f"the communication profile {lacks}: a line needs at least {FEWEST_SIZES} timed sizes"]


def _line_of(spec: CommSpec) -> tuple[str, str, str, int]:
    return spec.collective, spec.transport, spec.dtype, spec.world_size


def profile_of(cells: Sequence[CommCell]) -> tuple[CommFit, ...]:
    """Fit median time as a line over bytes sent per rank, for each collective, transport, dtype and world size. With
    several world sizes, also fit one line for all of them, with a term per rank.
    """
    by_world: dict[tuple[str, str, str, int | None], list[Point]] = {}
    over_worlds: dict[tuple[str, str, str, int | None], list[Point]] = {}
    unsettled = left_out(cells)
    for cell in cells:
        if cell.slowest is not None and cell not in unsettled:
            spec = cell.spec
            point = Point(wire_bytes=wire_bytes(spec), world_size=spec.world_size, time_s=cell.slowest.median_s)
            by_world.setdefault(_line_of(spec), []).append(point)
            over_worlds.setdefault((*_line_of(spec)[:3], None), []).append(point)
    fits = []
    for (collective, transport, dtype, world_size), points in (by_world | over_worlds).items():
        line = fit_line(points, by_rank=world_size is None)
        if line is not None:
            kind = {"collective": collective, "way": transport, "dtype": dtype, "world_size": world_size}
            fits.append(CommFit(**kind, **dataclasses.asdict(line)))  # type: ignore[arg-type]
    return tuple(fits)


def left_out(cells: Sequence[CommCell]) -> list[CommCell]:
    """Cells that the fit excludes for unstable times, unless too few stable ones remain."""
    groups: dict[tuple[str, str, str, int], list[CommCell]] = {}
    for cell in cells:
        groups.setdefault(_line_of(cell.spec), []).append(cell)
    found = []
    for group in groups.values():
        timed = [(cell, cell.slowest.drift) for cell in group if cell.slowest is not None]
        if sum(drift <= _SETTLED for _, drift in timed) >= FEWEST_SIZES:
            found += [cell for cell, drift in timed if drift > _SETTLED]
    return found
