"""Find the fastest version of a step, one measured change at a time.

Each change alternates with the best step so far and is kept only if it is measurably faster. The result ends with the
command, and the Python lines for your own loop.

For example: steplab advise --model small --context 512

With your own model: steplab advise --model my_model:build --keep-precision --budget 5min

On several GPUs: steplab advise --model xl --context 512 --layout fsdp=2 --steps 10 --budget 20min
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, StepOptions
from steplab.specs.changes import OPT_IN


def advise(
    *,
    step: StepOptions = StepOptions(),
    keep_precision: Annotated[bool, Parameter(help="Keep the number format: try neither bf16 nor TF32")] = False,
    opt_in: Annotated[tuple[str, ...], Parameter(help=f"Also try this change of numerics: {', '.join(OPT_IN)}")] = (),
    budget: Annotated[
        str, Parameter(help="Start no change after this long: 90s, 10min, 2h; 'none' tries all")
    ] = "10min",
    name: Annotated[str, Parameter(help="Name of the records in listings", show_default=False)] = "",
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say, say_stored
    from steplab.cli.progress import ProgressLine
    from steplab.lab.advising import advise as walk
    from steplab.lab.turns import STEPS
    from steplab.report.advice.document import REPORT, tried_words
    from steplab.specs.resolve import resolve_step
    from steplab.units import parse_duration

    chosen = chosen_format(out.format, out)
    with ProgressLine() as line:
        advice = walk(
            resolve_step({"steps": STEPS} | step.fields()),
            keep_precision=keep_precision,
            opt_in=opt_in,
            budget_s=None if budget == "none" else parse_duration(budget),
            name=name,
            store=out.store,
            on_progress=line.alive,
            on_change=lambda what: say(f"measuring {what} …"),
            on_tried=lambda tried: say(tried_words(tried)),
        )
    emit_document(REPORT.document(advice), chosen, out, stored=advice.id)
    say_stored("search", advice.id)
    return 1 if advice.failure else 0
