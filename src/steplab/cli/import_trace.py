"""steplab import-trace"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions


def import_trace(
    file: Annotated[Path, Parameter(help="A Kineto trace (.json, .json.gz), or an nsys SQLite export")],
    /,
    *,
    name: Annotated[str | None, Parameter(help="What to call it in listings [default: the file's name]")] = None,
    out: OutputOptions = OutputOptions(),
) -> None:
    """Take a trace that any profiler made into a record, and show where its time went.

    For example: steplab import-trace trace.json.gz
    """
    from steplab.cli.output import chosen_format
    from steplab.cli.profile import show_profile
    from steplab.cli.progress import ProgressLine
    from steplab.lab.profiling import import_trace as take

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        record = take(file, name=name, store=out.store, on_progress=line.within)
    show_profile(record, chosen, out)
