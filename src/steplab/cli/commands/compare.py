"""Compare two records, or two sets of records, and decide if the second is worse.

A and B are ids or their beginnings, last, last~1 (the record before), names, tags, studies, git revisions or exports
(.jsonl). other.db is another store, other.db:last a record in it. Steps, device and versions must agree.

Exit codes: 0 if nothing is worse; 4 if a step time or peak memory grew by more than the threshold, or a cell failed; 3
if undecided or mismatched.

For example: steplab compare baseline.jsonl last --threshold 3%
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import PageOptions


def compare(
    a: Annotated[str, Parameter(help="Baseline", show_default=False)],
    b: Annotated[str, Parameter(help="Records to compare with it")] = "last",
    /,
    *,
    allow: Annotated[
        tuple[str, ...],
        Parameter(help="Field that may differ: torch, device, precision; may be repeated", show_default=False),
    ] = (),
    threshold: Annotated[
        str | None,
        Parameter(
            help="Smallest difference that matters: 3% or 0.03 [default: 1%; 5% for times of one process a side]"
        ),
    ] = None,
    out: PageOptions = PageOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document
    from steplab.lab.comparing import compare as compare_records
    from steplab.report.compare.document import compare_document
    from steplab.units import parse_share

    chosen = chosen_format(out.format, out)
    smallest = parse_share(threshold) if threshold else None
    comparison = compare_records(a, b, threshold=smallest, allow=allow, store=out.store)
    emit_document(compare_document(comparison), chosen, out)
    return {"fine": 0, "undecided": 3, "regression": 4}[comparison.outcome]
