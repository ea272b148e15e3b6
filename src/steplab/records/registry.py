"""Kinds of stored records.

Code for several kinds looks them up here instead of testing a record's type. A new kind needs one entry here, and a
report in `report.report`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from steplab.records.advice import ADVICE_ROW, Advice
from steplab.records.attention import AttentionRun, attention_cells
from steplab.records.ceilings import Ceilings, ceilings_cells, ceilings_row
from steplab.records.comm import COMM_ROW, CommRun, comm_cells
from steplab.records.ddp import DDP_ROW, DdpRun, ddp_cells
from steplab.records.figure import MeasuredCell
from steplab.records.numerics import Numerics
from steplab.records.record import Record
from steplab.records.rows import DESCRIPTION, KINDS_OF_RUNS, Figures, Row, benchmark_row, run_cells, run_row, step_row
from steplab.records.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    type: type[Record]
    title: str
    """Heading of a report that has only this kind."""
    noun: str
    """Name of one record in sentences, such as 'data-parallel study'."""
    plural: str
    verb: str
    listed: Figures = ()
    """Figures that this kind adds to a row in lists."""
    make_row: Callable[[Any, str, Figures], Row] = benchmark_row
    """Maps a record, `verb` and `listed` to a row."""
    cells: Callable[[Any], tuple[MeasuredCell, ...]] | None = None
    """Maps a record to its cells for comparison; None: not comparable."""
    stands_alone: bool = True
    """True if each record has its own report, as benchmarks do."""

    def row(self, record: Any) -> Row:
        """Flat row in lists, CSV and the store's summary."""
        return self.make_row(record, self.verb, self.listed)

    @property
    def schema(self) -> str:
        """Format of the records: steplab.<name>/<major>."""
        return str(next(field.default for field in fields(self.type) if field.name == "schema"))

    @property
    def name(self) -> str:
        """Name in `schema`: run, attention, comm."""
        return _name_in(self.schema)


def _name_in(schema: str) -> str:
    return schema.removeprefix("steplab.").partition("/")[0]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            type=Run,
            make_row=lambda run, verb, listed: run_row(run),
            cells=run_cells,
            title="Measured steps",
            noun="run",
            plural="runs",
            verb="run",
            stands_alone=False,
        ),
        Kind(
            type=Advice,
            listed=ADVICE_ROW,
            make_row=partial(step_row, step=lambda advice: advice.best or advice.spec),
            title="Advice",
            noun="search for a faster step",
            plural="searches for a faster step",
            verb="advise",
        ),
        Kind(
            type=Numerics,
            make_row=step_row,
            title="Precision",
            noun="precision audit",
            plural="precision audits",
            verb="precision",
            stands_alone=False,
        ),
        Kind(
            type=AttentionRun,
            listed=(DESCRIPTION,),
            cells=attention_cells,
            title="Attention",
            noun="attention benchmark",
            plural="attention benchmarks",
            verb="attention",
        ),
        Kind(
            type=CommRun,
            listed=COMM_ROW,
            cells=comm_cells,
            title="Collectives",
            noun="benchmark of collectives",
            plural="benchmarks of collectives",
            verb="comm",
        ),
        Kind(
            type=DdpRun,
            listed=DDP_ROW,
            make_row=partial(benchmark_row, step=lambda run: run.study.step),
            cells=ddp_cells,
            title="Data parallelism",
            noun="data-parallel study",
            plural="data-parallel studies",
            verb="ddp",
        ),
        Kind(
            type=Ceilings,
            make_row=ceilings_row,
            cells=ceilings_cells,
            title="Ceilings",
            noun="set of ceilings",
            plural="sets of ceilings",
            verb="doctor",
        ),
    )
}
"""Kinds by name, in the order of report pages."""

KINDS_IN_LISTS = (*KINDS_OF_RUNS, *(kind.verb for kind in KINDS.values() if kind.type is not Run))


def kind_of(record: Record) -> Kind:
    return KINDS[_name_in(record.schema)]


def summary_row(record: Record) -> Row:
    return kind_of(record).row(record)
