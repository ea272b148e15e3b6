"""Benchmark collectives: time, algorithm and bus bandwidth by message size, world size and backend.

Every result is checked, and the samples of every rank are stored. The line alpha + beta * bytes, fitted to the times,
is the machine's communication profile. Without --gpus or --processes, all GPUs take part, or two processes on the CPU.

For example: steplab comm --processes 2 --collective all_reduce --size 100kB,1MB,10MB

On several machines: torchrun --nproc-per-node 8 --nnodes 2 ... -m steplab comm
"""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from steplab.cli.options import GivenLists, OutputOptions, ProcessOptions

_CELLS = Group.create_ordered("What is measured (every combination of the listed values)")


def _cell(help: str) -> Parameter:
    return Parameter(help=help, group=_CELLS)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CommOptions(GivenLists):
    """The collectives, their message sizes, and the processes and backends that carry them out."""

    collective: Annotated[
        str | None,
        _cell("all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv [default: all of them]"),
    ] = None
    size: Annotated[
        str | None,
        _cell("Message sizes: 64kB,1MB [default: on GPUs 1MB,10MB,100MB,1GB; on a CPU 10kB,100kB,1MB,10MB]"),
    ] = None
    world_size: Annotated[
        str | None,
        _cell("Numbers of ranks that take part [default: powers of two up to the number of processes, and all]"),
    ] = None
    backend: Annotated[
        str | None, _cell("Backends: nccl, gloo, peer_copy (all_reduce only) [default: nccl, or gloo on a CPU]")
    ] = None
    device: Annotated[
        str | None, _cell("Devices of the tensors: cuda, cpu [default: the backend's native device, cuda for nccl]")
    ] = None
    dtype: Annotated[str | None, _cell("Number formats: fp32, bf16, fp16 [default: fp32]")] = None


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
    from steplab.cli.output import chosen_format, emit_document, say
    from steplab.cli.progress import ProgressLine
    from steplab.lab.benchmark import went_well
    from steplab.lab.comm import comm_study, measure_comm
    from steplab.lab.processes import is_first_rank
    from steplab.report.comm.document import comm_cell_line, comm_document
    from steplab.units import parse_duration

    chosen = chosen_format(out.format, out)
    study, device = comm_study(cells.lists(), gpus=spread.gpus, processes=spread.processes, repeats=repeats)
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
        emit_document(comm_document(run), chosen, out)
        say(f"benchmark {run.id}; `steplab report {run.id} --output page.html` draws it")
    return 0 if went_well(run) else 1
