"""Import a trace of torch.profiler or Nsight Systems, and show where its time went.

For example: steplab import-trace trace.json.gz
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions


def import_trace(
    file: Annotated[Path, Parameter(help="Kineto trace (.json, also .gz or .xz) or Nsight Systems' SQLite export")],
    /,
    *,
    name: Annotated[str | None, Parameter(help="Name of the run in listings [default: the file's name]")] = None,
    step_range: Annotated[str | None, Parameter(help="Ranges that mark steps, such as 'training_step_*'")] = None,
    out: OutputOptions = OutputOptions(),
) -> None:
    from steplab.cli.commands.profile import show_profile
    from steplab.cli.output import chosen_format
    from steplab.cli.progress import ProgressLine
    from steplab.lab.profiling import import_trace as take

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        record = take(file, name=name, store=out.store, step_range=step_range, on_progress=line.within)
    show_profile(record, chosen, out)
