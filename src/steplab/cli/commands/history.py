"""Show a figure of stored runs over the commits at which they were measured, and where its level changed.

The options of a step choose the runs; each step and device has a history of its own.

For example: steplab history --model small --metric step_time
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import GivenFields, PageOptions, step_options
from steplab.specs.step import FIELDS


@step_options(changed={field.key: field.meaning for field in FIELDS.values()})
class ChosenSteps(GivenFields):
    """Values of a step's fields, by which runs are chosen."""


def history(
    *,
    metric: Annotated[
        str, Parameter(help="Figure of a run, as in `steplab list --format json`: step_time, mfu, peak_allocated")
    ] = "step_time",
    name: Annotated[str | None, Parameter(help="Take the runs of this name alone")] = None,
    threshold: Annotated[str, Parameter(help="Smallest change that is marked: 3% or 0.03")] = "1%",
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
