"""Compare two or more steps by measuring them alternately on one device, A B B A.

Options outside quotes apply to every side; each quoted text holds one side's own. With one quoted text, its step is
compared with the step without it. --against compares with the code of another revision.

For example: steplab ab --model small '--attention plain' '--attention sdpa'

Your model before and after a change: steplab ab --against main --model my_model:build

Exit codes: 0 if no side is slower than the first by more than the threshold, 4 if one is, 3 if undecided, 1 if a side
failed.
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, Recipe, StepOptions


def ab(
    *sides: Annotated[
        str,
        Parameter(
            help="A side's options of `steplab run`, in quotes: '--precision bf16 --compile block'",
            allow_leading_hyphen=True,
        ),
    ],
    step: StepOptions = StepOptions(),
    recipe: Recipe = None,
    against: Annotated[
        str | None, Parameter(help="Git revision whose code side A runs; side B runs the working tree's")
    ] = None,
    threshold: Annotated[
        str | None,
        Parameter(help="Smallest difference that matters: 3% or 0.03 [default: 1%; 5% with a process per turn]"),
    ] = None,
    starts: Annotated[
        int | None, Parameter(help="Fresh starts of each side [default: 3; 1 if a start takes over a minute]")
    ] = None,
    name: Annotated[str, Parameter(help="Name of the records in listings", show_default=False)] = "",
    timeout: Annotated[str, Parameter(help="Stop waiting for a side after this long: 90s, 5min")] = "1h",
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.options import fields_in
    from steplab.cli.output import chosen_format, emit_document, say
    from steplab.cli.progress import ProgressLine
    from steplab.lab.turns import ab as measure
    from steplab.report.turns.document import turns_document
    from steplab.units import parse_duration, parse_share

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        found = measure(
            *map(fields_in, sides),
            against=against,
            threshold=parse_share(threshold) if threshold else None,
            starts=starts,
            name=name,
            store=out.store,
            timeout_s=parse_duration(timeout),
            on_progress=line.alive,
            on_side=lambda label: say(f"preparing {label} …"),
            recipe=recipe,
            **step.fields(),
        )
    words = [against, "working tree"] if against else ["as given", *sides] if len(sides) == 1 else sides
    document = turns_document(found.starts, found.each, words)
    emit_document(document, chosen, out, stored=" ".join(run.id for run in found.runs))
    if any(run.failure for run in found.runs):
        return 1
    exceeds = [ratio.exceeds if ratio else None for ratio in found.ratios]
    return 4 if True in exceeds else 3 if None in exceeds else 0
