"""Compare two records, or two sets of records, and say whether the second is worse.

A and B are each the beginning of an id; last, or last~1 for the record before it; the name or tag of records; a study;
a git revision at which records were measured; an export (.jsonl); or a store, alone or with one of these behind it, as
in other.db:last. What measures the same is compared: the fields of the step, the device and the versions must agree.

Exit codes: 0 if nothing is worse, 4 if a step time or a peak memory certainly grew by more than the threshold or a cell
fails, 3 if that cannot be decided or A and B are not alike.

For example: steplab compare baseline.jsonl last --threshold 3%
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import PageOptions


def compare(
    a: Annotated[str, Parameter(help="What to compare with", show_default=False)],
    b: Annotated[str, Parameter(help="What is compared")] = "last",
    /,
    *,
    allow: Annotated[
        tuple[str, ...],
        Parameter(
            help="Name of a field that may differ, such as torch, device or precision; may be repeated",
            negative="",
            show_default=False,
        ),
    ] = (),
    threshold: Annotated[
        str | None,
        Parameter(
            help="Smallest difference that matters: 3% or 0.03 [default: 5% for times of one process a side, 1% for "
            "several and for memory]"
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
