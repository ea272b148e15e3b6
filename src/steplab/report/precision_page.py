"""The part of a page about precision: each audit with its sentences and tables, the sums, and the runs side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steplab.records.numerics import Accumulation, Audit, Numerics
from steplab.records.run import Run
from steplab.report import precision_words as words
from steplab.report.columns import make_sheet
from steplab.report.grid import Grid
from steplab.report.kit.text import reason
from steplab.report.precision_grids import (
    accumulation_grid,
    accumulation_title,
    loss_grid,
    matmul_grid,
    operation_grid,
    scaling_grid,
    type_grid,
)
from steplab.report.precision_rows import TIMING_COLUMNS, timing_rows
from steplab.report.profile_page import Block, ProfileSection


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPart:
    """What a page shows of precision."""

    timings: Grid | None
    """The same step in several precisions; None: the runs are not that."""
    audits: tuple[ProfileSection, ...]
    """An audit each."""
    sums: Block | None
    """The accumulation study; None: there is none."""


def precision_part(runs: Sequence[Run], numerics: Sequence[Numerics]) -> PrecisionPart | None:
    """What is told of precision on a page of `runs` and `numerics`; None without any of the latter."""
    if not numerics:
        return None
    sums: Sequence[Accumulation] = next((n.accumulations for n in numerics if n.accumulations), ())
    studies = {record.study for record in numerics if record.study}
    timed = [run for run in runs if run.study in studies]
    return PrecisionPart(
        timings=_timings(timed) if timed else None,
        audits=tuple(_section(record) for record in numerics if record.spec),
        sums=Block(title=accumulation_title(sums), grid=accumulation_grid(sums)) if sums else None,
    )


def _timings(runs: Sequence[Run]) -> Grid:
    sheet = make_sheet(timing_rows(runs), TIMING_COLUMNS)
    return Grid(
        headers=tuple(column.header for column in sheet.columns),
        rows=sheet.cells,
        numeric=tuple(column.numeric for column in sheet.columns),
        caption=sheet.caption,
        bad_rows=frozenset(index for index, run in enumerate(runs) if run.failure),
    ).without("id")


def _section(numerics: Numerics) -> ProfileSection:
    failure = [reason(numerics.failure.kind, numerics.failure.message, most=None)] if numerics.failure else []
    return ProfileSection(
        title=words.title(numerics),
        heading=words.heading(numerics),
        told=(*failure, *(words.told(numerics, numerics.audit) if numerics.audit else ()), *numerics.notes),
        blocks=tuple(_blocks(numerics.audit)) if numerics.audit else (),
        folded=False,
    )


def _blocks(audit: Audit) -> Iterator[Block]:
    yield Block(title="Types by module", grid=type_grid(audit))
    yield Block(title="Operations, and autocast's rule for each", grid=operation_grid(audit))
    yield Block(title="Products of matrices, after every cast", grid=matmul_grid(audit))
    yield Block(title="Overflow and underflow", grid=loss_grid(audit))
    if audit.loss_scaling:
        yield Block(title="Loss scaling: all gradients", grid=scaling_grid(audit.loss_scaling))
