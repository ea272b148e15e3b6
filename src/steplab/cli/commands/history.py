"""Show a figure of stored runs by commit, and where its level changed.

Options of a step select runs; each step and device has its own history.

For example: steplab history --model small --metric step_time
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import GivenFields, PageOptions
from steplab.specs.step import FIELDS


class ChosenSteps(GivenFields, declared=FIELDS.values(), with_defaults=False):
    """Fields of a step; runs with other values are not shown."""


def history(
    *,
    metric: Annotated[
        str, Parameter(help="Figure in `steplab list --format json`: step_time, mfu, peak_allocated")
    ] = "step_time",
    name: Annotated[str | None, Parameter(help="Only runs of this name")] = None,
    threshold: Annotated[str, Parameter(help="Smallest change to mark: 3% or 0.03")] = "1%",
    step: ChosenSteps = ChosenSteps(),
    out: PageOptions = PageOptions(),
) -> None:
    from steplab.cli.output import chosen_format, emit_document
    from steplab.lab.comparing import history as histories_of
    from steplab.report.history.document import history_document
    from steplab.units import parse_share

    chosen = chosen_format(out.format, out)
    found = histories_of(metric, fields=step.grid(), name=name, threshold=parse_share(threshold), store=out.store)
    emit_document(history_document(found), chosen, out)
