"""Benchmark attention alone: time, FLOP/s, saved and peak memory, error against float64.

Implementations alternate, so their ratios are fair. Each combination of listed values is a cell; they replace
the grid's values. Cells that run out of memory are rows too.

For example: steplab attention --sequence 256,512 --dim 64 --implementation plain,sdpa
"""

from typing import Annotated

from cyclopts import Group, Parameter

from steplab.cli.options import QUIET, GivenFields, OutputOptions
from steplab.specs.attention import ATTENTION

_CELLS = Group.create_ordered("Cells: every combination of the listed values, which replace the grid's")


class AttentionOptions(GivenFields, declared=ATTENTION.cells.values(), others=ATTENTION.own, group=_CELLS):
    """Options of `attention`: fields of its cells, then those of the whole benchmark."""


def attention(
    *,
    asked: AttentionOptions = AttentionOptions(),
    against: Annotated[
        str | None,
        Parameter(help="Implementation that speeds are relative to [default: sdpa_flash, else sdpa, else plain]"),
    ] = None,
    derive: Annotated[
        bool,
        Parameter(
            help="List the tensors of plain attention in the smallest cell that ran out of memory; "
            "with --gpu, the smallest that would on that GPU",
        ),
    ] = False,
    gpu: Annotated[str | None, Parameter(help="GPU memory that --derive compares with")] = None,
    name: Annotated[str, Parameter(help="Name of the benchmark in listings")] = "",
    timeout: Annotated[str, Parameter(help=QUIET)] = ATTENTION.timeout,
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say_stored
    from steplab.cli.progress import measuring
    from steplab.errors import UserError
    from steplab.lab.attention import account_for_memory, attention_study, measure_attention
    from steplab.report.attention.document import account_document, attention_cell_line, report_against

    chosen = chosen_format(out.format, out)
    if gpu is not None and not derive:
        raise UserError("--gpu needs --derive: steplab measures on this machine only; add --derive")
    study = attention_study({**asked.grid(), **asked.options()})
    if derive:
        account = account_for_memory(study.cells, gpu, store=out.store)
        emit_document(account_document(account), chosen, out)
        return 0
    columns = list(dict.fromkeys(cell.column for cell in study.cells))
    if against is not None and against not in columns:
        raise UserError(f"--against '{against}' is not among the implementations; choose one of {'; '.join(columns)}")
    with measuring(len(study.cells), attention_cell_line, name, timeout, out) as how:
        run = measure_attention(study, **how)
    emit_document(report_against(against).document(run), chosen, out, stored=run.id)
    say_stored("benchmark", run.id)
    return 1 if all(cell.failure for cell in run.cells) else 0
