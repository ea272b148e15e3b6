"""Show a figure of stored runs over the commits at which they were measured, and where its level changed.

The options of a step choose the runs; each step and device has a history of its own.

For example: steplab history --model small --metric step_time
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import FileOptions, GivenFields, step_options


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@step_options()
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
    format: Annotated[
        Literal["table", "json", "csv", "md", "latex", "html"] | None,
        Parameter(help="Format of the output [default: by the suffix of --output, else table]"),
    ] = None,
    out: FileOptions = FileOptions(),
) -> None:
    from steplab.cli.output import ROW_FORMATS, chosen_format, emit, stdout_color
    from steplab.lab.history import history as histories_of
    from steplab.report.history.document import history_document
    from steplab.report.kit.html import to_html
    from steplab.report.kit.rendering import render
    from steplab.units import parse_share

    chosen = chosen_format(format, out, allowed=(*ROW_FORMATS, "html"))
    found = histories_of(metric, fields=step.grid(), name=name, threshold=parse_share(threshold), store=out.store)
    document = history_document(found)
    color = stdout_color() and out.output is None
    emit(to_html(document) if chosen == "html" else render(document, chosen, color=color), out, chosen)
