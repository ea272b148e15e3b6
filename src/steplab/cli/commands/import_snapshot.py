"""Import a memory snapshot of any program, and show where its memory went.

No code in the file runs. Categories need the marks of `memory --snapshot` next to the file (snapshot.marks.json);
otherwise memory is split by the start of the history.

For example: steplab import-snapshot snapshot.pickle
"""

import os.path
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions


def import_snapshot(
    file: Annotated[Path, Parameter(help="Snapshot of torch.cuda.memory._dump_snapshot (.pickle, also .gz or .xz)")],
    /,
    *,
    name: Annotated[str | None, Parameter(help="Name of the run in listings [default: the file's name]")] = None,
    out: OutputOptions = OutputOptions(),
) -> None:
    from steplab.cli.commands.memory import show_memory
    from steplab.cli.output import chosen_format, say, say_stored
    from steplab.cli.progress import ProgressLine
    from steplab.lab import memory

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        record = memory.import_snapshot(file, name=name, store=out.store, on_progress=line.within)
    show_memory(record, chosen, out)
    say_stored("record", record.id)
    marks = memory.marks_beside(file)
    if not os.path.exists(marks):
        say(
            f"steplab: categories of memory are unknown; if `memory --snapshot` wrote this file, put its marks "
            f"at {marks}"
        )
