"""Audit a precision: its data types, the values lost, and the time and memory saved.

By default fp16 and bf16 are audited and every supported precision is timed; bf16_master needs --optimizer adamw_triton.
--model toy shows every autocast rule in two layers. Results are stored.

For example: steplab precision --model toy --only audit --precision bf16
"""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, StepOptions, timeout_help


def precision(
    *,
    step: StepOptions = StepOptions(),
    only: Annotated[
        Literal["audit", "accumulation", "timings"] | None,
        Parameter(
            help="Only this part: audit (data types, lost values), accumulation (0.01 added a thousand "
            "times), timings (time and memory) [default: all three]"
        ),
    ] = None,
    name: Annotated[str, Parameter(help="Name of the records in listings", show_default=False)] = "",
    timeout: Annotated[str, Parameter(help=timeout_help("a process"))] = "1h",
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say
    from steplab.cli.progress import ProgressLine
    from steplab.errors import UserError
    from steplab.lab import precision as lab
    from steplab.report.precision.document import precision_document
    from steplab.units import counted, parse_duration

    fields: dict[str, Any] = step.fields(without=("precision",))
    precisions = tuple(map(str, step.grid().get("precision", ())))
    chosen = chosen_format(out.format, out)
    if chosen == "csv" and only is None:
        raise UserError("--format csv holds one table; set --only to audit, accumulation or timings")
    with ProgressLine() as line:
        try:
            result = lab.precision(
                precisions=precisions,
                parts=(only,) if only else lab.PARTS,
                name=name,
                store=out.store,
                timeout_s=parse_duration(timeout),
                on_progress=line.within,
                on_sweep=line.sweep,
                **fields,
            )
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt("finished parts are stored") from error
    document = precision_document(result.numerics, result.runs, with_sums=only in (None, "accumulation"))
    emit_document(document, chosen, out)
    for numerics in result.numerics:
        if numerics.failure and numerics.spec:
            say(f"steplab: {numerics.spec.precision}: {numerics.failure.message}")
    ids = "" if result.study_id else " ".join(["", *(numerics.id for numerics in result.numerics)])
    kept = f"study {result.study_id}" if result.study_id else counted(len(result.numerics), "record")
    say(f"{kept}; `steplab report{ids} --output page.html` draws it")
    failures = [*(record.failure for record in result.numerics), *(run.failure for run in result.runs)]
    return 1 if all(failures) else 0
