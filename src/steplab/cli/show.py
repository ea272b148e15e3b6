"""steplab show"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import StoreOptions
from steplab.errors import UserError


def show(
    id: Annotated[str, Parameter(help="The record's id, or the beginning of it")],
    /,
    *,
    format: Annotated[str, Parameter(help="table, or json: the whole record, raw samples included")] = "table",
    store: StoreOptions = StoreOptions(),
) -> None:
    """Show one record in full."""
    from steplab.cli.output import ROW_FORMATS, emit, stdout_color
    from steplab.lab.keeping import open_store
    from steplab.lab.memory_references import memory_references
    from steplab.records.attention import AttentionRun
    from steplab.records.ceilings import Ceilings
    from steplab.records.codec import encode
    from steplab.records.comm import CommRun
    from steplab.records.ddp import DdpRun
    from steplab.records.numerics import Numerics
    from steplab.records.run import Run
    from steplab.report.attention_text import render_attention
    from steplab.report.ceilings_text import render_ceilings
    from steplab.report.comm_text import render_comm
    from steplab.report.ddp_text import render_ddp
    from steplab.report.precision_text import render_numerics
    from steplab.report.run_text import render_run

    if format not in ("table", "json"):
        rows = f"; `steplab report {id} --format {format}` writes its row" if format in ROW_FORMATS else ""
        raise UserError(f"show writes table and json, not {format}{rows}")
    with open_store(store.store, write=False) as opened:
        record = opened.get(id)
    if format == "json":
        emit(encode(record).decode())
    elif isinstance(record, Run):
        references = memory_references([record], store.store)
        emit(render_run(record, references=references, color=stdout_color()))
    elif isinstance(record, Numerics):
        emit(render_numerics(record, color=stdout_color()))
    elif isinstance(record, AttentionRun):
        emit(render_attention(record, color=stdout_color()))
    elif isinstance(record, CommRun):
        emit(render_comm(record, color=stdout_color()))
    elif isinstance(record, DdpRun):
        emit(render_ddp(record, color=stdout_color()))
    elif isinstance(record, Ceilings):
        emit(render_ceilings(record, color=stdout_color()))
