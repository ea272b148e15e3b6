"""steplab import-snapshot"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions


def import_snapshot(
    file: Annotated[
        Path,
        Parameter(help="A memory snapshot, as torch.cuda.memory._dump_snapshot writes it (.pickle, also .gz or .xz)"),
    ],
    /,
    *,
    name: Annotated[str | None, Parameter(help="What to call it in listings [default: the file's name]")] = None,
    out: OutputOptions = OutputOptions(),
) -> None:
    """Take a memory snapshot that anyone made into a record, and show where the memory went.

    Reading the file executes nothing in it. Its categories are what was there before its history begins, and since; or
    those of `memory`, where the marks that `memory --snapshot` keeps lie beside it (snapshot.marks.json).

    For example: steplab import-snapshot snapshot.pickle
    """
    from steplab.cli.memory import next_step, show_memory
    from steplab.cli.output import chosen_format, say
    from steplab.cli.progress import ProgressLine
    from steplab.lab.memory_import import import_snapshot as take
    from steplab.lab.memory_reading import marks_beside

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        record = take(file, name=name, store=out.store, on_progress=line.within)
    show_memory(record, chosen, out)
    say(next_step(record))
    marks = marks_beside(file)
    if not marks.exists():
        say(f"steplab: whose memory it was is not known; if `memory --snapshot` made it, put its marks at {marks}")
