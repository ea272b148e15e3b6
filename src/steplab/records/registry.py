"""Kinds of stored records: name, type, format and row of each.

Code for several kinds (codec, store, `list`, `show`, `report`, `export`, `import`) uses this registry, never a record's
type. A new kind is one entry here, and its report in `report.report`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from steplab.records.advice import Advice, advice_row
from steplab.records.attention import AttentionRun, attention_cells, attention_row
from steplab.records.ceilings import Ceilings, ceilings_cells, ceilings_row
from steplab.records.comm import CommRun, comm_cells, comm_row
from steplab.records.ddp import DdpRun, ddp_cells, ddp_row
from steplab.records.measured import MeasuredCell
from steplab.records.numerics import Numerics, numerics_row
from steplab.records.record import Record
from steplab.records.rows import KINDS_OF_RUNS, Row, run_row
from steplab.records.run import Run
from steplab.records.run_cells import run_cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of stored record."""

    type: type[Record]
    """Class of the records."""
    row: Callable[[Any], Row]
    """Function for the flat row in listings, CSV and the store's summary."""
    cells: Callable[[Any], tuple[MeasuredCell, ...]] | None
    """Function for the compared cells; None: not comparable."""
    title: str
    """Heading of a report of only this kind."""
    noun: str
    """One record in sentences, such as 'data-parallel study'."""
    plural: str
    """Plural of `noun`."""
    verb: str
    """Command that makes the records."""
    stands_alone: bool = False
    """True if each record is reported alone, as benchmarks are."""

    @property
    def schema(self) -> str:
        """Format of the records: steplab.<name>/<major>."""
        return str(next(field.default for field in fields(self.type) if field.name == "schema"))

    @property
    def name(self) -> str:
        """Kind in the format: run, attention, comm."""
        return _name_in(self.schema)


def _name_in(schema: str) -> str:
    return schema.removeprefix("steplab.").partition("/")[0]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            type=Run,
            row=run_row,
            cells=run_cells,
            title="Measured steps",
            noun="run",
            plural="runs",
            verb="run",
        ),
        Kind(
            type=Advice,
            row=advice_row,
            cells=None,
            title="Advice",
            noun="walk to a faster step",
            plural="walks to a faster step",
            verb="advise",
            stands_alone=True,
        ),
        Kind(
            type=Numerics,
            row=numerics_row,
            cells=None,
            title="Precision",
            noun="precision audit",
            plural="precision audits",
            verb="precision",
        ),
        Kind(
            type=AttentionRun,
            row=attention_row,
            cells=attention_cells,
            title="Attention",
            noun="attention benchmark",
            plural="attention benchmarks",
            verb="attention",
            stands_alone=True,
        ),
        Kind(
            type=CommRun,
            row=comm_row,
            cells=comm_cells,
            title="Collectives",
            noun="benchmark of collectives",
            plural="benchmarks of collectives",
            verb="comm",
            stands_alone=True,
        ),
        Kind(
            type=DdpRun,
            row=ddp_row,
            cells=ddp_cells,
            title="Data parallelism",
            noun="data-parallel study",
            plural="data-parallel studies",
            verb="ddp",
            stands_alone=True,
        ),
        Kind(
            type=Ceilings,
            row=ceilings_row,
            cells=ceilings_cells,
            title="Ceilings",
            noun="set of ceilings",
            plural="sets of ceilings",
            verb="doctor",
            stands_alone=True,
        ),
    )
}
"""Kinds by name, in page order."""

KINDS_IN_LISTS = (*KINDS_OF_RUNS, *(kind.verb for kind in KINDS.values() if kind.type is not Run))
"""Values of a row's field `kind`."""


def kind_of(record: Record) -> Kind:
    return KINDS[_name_in(record.schema)]


def summary_row(record: Record) -> Row:
    return kind_of(record).row(record)
