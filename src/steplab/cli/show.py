"""steplab show"""

from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import StoreOptions


def show(
    id: Annotated[str, Parameter(help="The record's id, or the beginning of it")],
    /,
    *,
    format: Annotated[
        Literal["table", "json"], Parameter(help="json gives the whole record, raw samples included")
    ] = "table",
    store: StoreOptions = StoreOptions(),
) -> None:
    """Show one record in full."""
    from steplab.cli.output import emit, stdout_color
    from steplab.lab.keeping import open_store
    from steplab.lab.memory import counterparts
    from steplab.records.attention import AttentionRun
    from steplab.records.codec import encode
    from steplab.records.numerics import Numerics
    from steplab.records.run import Run
    from steplab.report.attention_text import render_attention
    from steplab.report.ceilings_text import render_ceilings
    from steplab.report.precision_text import render_numerics
    from steplab.report.run_text import render_run

    with open_store(store.store, write=False) as opened:
        record = opened.get(id)
    if format == "json":
        emit(encode(record).decode(), None)
    elif isinstance(record, Run):
        others = counterparts(record, store.store) if record.memory_profile else ()
        emit(render_run(record, others=others, color=stdout_color()), None)
    elif isinstance(record, Numerics):
        emit(render_numerics(record, color=stdout_color()), None)
    elif isinstance(record, AttentionRun):
        emit(render_attention(record, color=stdout_color()), None)
    else:
        emit(render_ceilings(record, color=stdout_color()), None)
