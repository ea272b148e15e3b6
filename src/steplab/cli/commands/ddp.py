"""Compare data-parallel variants of one step: time, exposed communication, memory, timelines.

Each variant alternates with the same step without communication. Default: two processes on the CPU, or torchrun's.

For example: steplab ddp --processes 2

On GPUs: steplab ddp --gpus 2 --model xl --context 512 --precision bf16 --compile block
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import GivenFields, OutputOptions, timeout_help
from steplab.specs.ddp import DDP


class DdpOptions(GivenFields, declared=DDP.cells.values(), others=DDP.own):
    """Options of `ddp`: fields of each rank's step, then those of the whole study."""


def ddp(
    *,
    asked: DdpOptions = DdpOptions(),
    name: Annotated[str, Parameter(help="Name of the study in listings")] = "",
    timeout: Annotated[str, Parameter(help=timeout_help("a variant"))] = DDP.timeout,
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say_stored
    from steplab.cli.progress import measuring
    from steplab.lab.ddp import ddp_study, measure_ddp
    from steplab.lab.machine import is_first_rank
    from steplab.report.ddp.document import REPORT, ddp_cell_line

    chosen = chosen_format(out.format, out)
    options = asked.options()
    study = ddp_study({**asked.fields(), **options})
    with measuring(len(study.contenders), ddp_cell_line, name, timeout, out) as how:
        run = measure_ddp(study, traces=options.get("traces"), force=out.force, **how)
    if not is_first_rank():
        return 0  # the first rank reports the result
    emit_document(REPORT.document(run), chosen, out, stored=run.id)
    say_stored("study", run.id)
    return 1 if all(cell.failure for cell in run.cells) else 0
