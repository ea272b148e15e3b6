"""Compare variants of data parallelism on one step: time, communication exposed and alone, memory, timelines.

Each variant is measured in turns with the same step without communication, which is always measured. Without --gpus or
--processes, two processes on the CPU take part, or those that torchrun started.

For example: steplab ddp --processes 2

On GPUs: steplab ddp --gpus 2 --model xl --context 512 --precision bf16 --compile block
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from steplab.cli.options import GivenFields, OutputOptions, ProcessOptions, step_options
from steplab.specs.ddp import CHOSEN_BY_THE_STUDY

_VARIANTS = Group.create_ordered("What is compared")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@step_options(
    without=CHOSEN_BY_THE_STUDY,
    changed={
        "batch": "Sequences in a micro-step, on each rank [default: 4; on a CPU 2]",
        "context": "Tokens per sequence [default: 128; on a CPU 64]",
        "compile": "What is compiled: off (eager), or block (each block by itself, so that gradients appear as the "
        "backward pass proceeds) [default: off]",
    },
)
class RankStepOptions(GivenFields):
    """The step of each rank."""


def ddp(
    *,
    step: RankStepOptions = RankStepOptions(),
    processes: ProcessOptions = ProcessOptions(),
    variants: Annotated[
        str,
        Parameter(
            name=("--variants", "--contenders"),  # the earlier name
            help="Variants to compare: naive, flat, overlap, bucketed, torch_ddp, sharded, fsdp2; bucketed:25 is one "
            "bucket size alone",
            group=_VARIANTS,
        ),
    ] = "naive,flat,overlap,bucketed,torch_ddp,sharded,fsdp2",
    bucket_sizes: Annotated[
        str | None,
        Parameter(
            help="Bucket sizes of bucketed and torch_ddp, in units of 1e6 bytes [default: 1,10,100,1000; on a CPU "
            "0.1,1,10]",
            group=_VARIANTS,
        ),
    ] = None,
    transport: Annotated[
        str | None,
        Parameter(
            help="Transport of bucketed and sharded: collectives, peer_copy (between GPUs of one host), or both "
            "[default: collectives]",
            group=_VARIANTS,
        ),
    ] = None,
    update: Annotated[
        str | None,
        Parameter(
            help="When overlap and bucketed update parameters: after (all gradients have arrived), overlapped (a "
            "fourth of them at a time, as soon as its gradients have arrived), or both [default: after]",
            group=_VARIANTS,
        ),
    ] = None,
    profiled_steps: Annotated[
        int, Parameter(help="Number of steps of each variant that are traced for its timeline; 0 traces none")
    ] = 2,
    traces: Annotated[Path | None, Parameter(help="Folder in which to keep the traces, one file per variant")] = None,
    name: Annotated[str, Parameter(help="Name of the study in listings")] = "",
    timeout: Annotated[str, Parameter(help="Time after which a variant is given up: 90s, 5min, 2h")] = "10min",
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say_stored
    from steplab.cli.progress import ProgressLine
    from steplab.lab.ddp import ddp_study, measure_ddp
    from steplab.lab.processes import is_first_rank
    from steplab.report.ddp.document import REPORT, ddp_cell_line
    from steplab.units import parse_duration

    chosen = chosen_format(out.format, out)
    study = ddp_study(
        step.fields(),
        gpus=processes.gpus,
        processes=processes.processes,
        variants=variants.split(","),
        bucket_sizes=bucket_sizes.split(",") if bucket_sizes else None,
        transport=tuple(part.strip() for part in transport.split(",")) if transport else None,
        update=tuple(part.strip() for part in update.split(",")) if update else None,
        profiled_steps=profiled_steps,
    )
    with ProgressLine() as line:
        run = measure_ddp(
            study,
            name=name,
            store=out.store,
            traces=traces,
            force=out.force,
            timeout_s=parse_duration(timeout),
            on_progress=line.alive,
            on_cell=lambda number, cell: line.done(number + 1, len(study.contenders), ddp_cell_line(cell)),
        )
    if not is_first_rank():
        return 0  # the first rank reports the result
    emit_document(REPORT.document(run), chosen, out, stored=run.id)
    say_stored("study", run.id)
    return 1 if all(cell.failure for cell in run.cells) else 0
