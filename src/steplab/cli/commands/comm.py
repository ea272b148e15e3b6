"""Benchmark collectives: time, algorithm and bus bandwidth by size, world size and backend.

Results are checked; the samples of every rank are stored. The times are fitted by alpha + beta * bytes, the machine's
communication profile. Default: all GPUs, or two processes on the CPU.

For example: steplab comm --processes 2 --collective all_reduce --size 100kB,1MB,10MB

On several machines: torchrun --nproc-per-node 8 --nnodes 2 ... -m steplab comm
"""

from typing import Annotated

from cyclopts import Group, Parameter

from steplab.cli.options import QUIET, GivenFields, OutputOptions
from steplab.specs.comm import COMM

_CELLS = Group.create_ordered("Cells: every combination of the listed values")


class CommOptions(GivenFields, declared=COMM.cells.values(), others=COMM.own, group=_CELLS):
    """Options of `comm`: fields of its cells, then those of the whole benchmark."""


def comm(
    *,
    asked: CommOptions = CommOptions(),
    name: Annotated[str, Parameter(help="Name of the benchmark in listings")] = "",
    timeout: Annotated[str, Parameter(help=QUIET)] = COMM.timeout,
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say_stored
    from steplab.cli.progress import measuring
    from steplab.lab.benchmark import went_well
    from steplab.lab.comm import comm_study, measure_comm
    from steplab.lab.machine import is_first_rank
    from steplab.report.comm.document import REPORT, comm_cell_line

    chosen = chosen_format(out.format, out)
    study, device = comm_study({**asked.grid(), **asked.options()})
    with measuring(len(study.cells), comm_cell_line, name, timeout, out) as how:
        run = measure_comm(study, device=device, **how)
    if is_first_rank():
        emit_document(REPORT.document(run), chosen, out, stored=run.id)
        say_stored("benchmark", run.id)
    return 0 if went_well(run) else 1
