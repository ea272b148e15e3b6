"""Benchmark collectives: time, algorithm and bus bandwidth by message size, world size and backend.

Every result is checked, and the samples of every rank are stored. The line alpha + beta * bytes, fitted to the times,
is the machine's communication profile. Without --gpus or --processes, all GPUs take part, or two processes on the CPU.

For example: steplab comm --processes 2 --collective all_reduce --size 100kB,1MB,10MB

On several machines: torchrun --nproc-per-node 8 --nnodes 2 ... -m steplab comm
"""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from steplab.cli.options import GivenFields, OutputOptions, ProcessOptions, field_options
from steplab.specs.comm import FIELDS

_CELLS = Group.create_ordered("What is measured (every combination of the listed values)")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@field_options(FIELDS.values(), _CELLS)
class CommOptions(GivenFields):
    """The collectives, their message sizes, and the processes and backends that carry them out."""


def comm(
    *,
    cells: CommOptions = CommOptions(),
    spread: ProcessOptions = ProcessOptions(),
    repeats: Annotated[
        int | None,
        Parameter(
            help="Samples of each cell; on a GPU a sample of short calls is the mean of many [default: 10 to 200, by "
            "their duration]"
        ),
    ] = None,
    name: Annotated[str, Parameter(help="Name of the benchmark in listings")] = "",
    timeout: Annotated[
        str, Parameter(help="Time without progress after which a cell is given up: 90s, 5min, 2h")
    ] = "5min",
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say_stored
    from steplab.cli.progress import ProgressLine
    from steplab.lab.benchmark import went_well
    from steplab.lab.comm import comm_study, measure_comm
    from steplab.lab.processes import is_first_rank
    from steplab.report.comm.document import REPORT, comm_cell_line
    from steplab.units import parse_duration

    chosen = chosen_format(out.format, out)
    study, device = comm_study(cells.grid(), gpus=spread.gpus, processes=spread.processes, repeats=repeats)
    with ProgressLine() as line:
        run = measure_comm(
            study,
            device=device,
            name=name,
            store=out.store,
            timeout_s=parse_duration(timeout),
            on_progress=line.alive,
            on_cell=lambda index, cell: line.done(index + 1, len(study.cells), comm_cell_line(cell)),
        )
    if is_first_rank():
        emit_document(REPORT.document(run), chosen, out, stored=run.id)
        say_stored("benchmark", run.id)
    return 0 if went_well(run) else 1
