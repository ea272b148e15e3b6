"""Explain a step's time, propose changes and estimate their savings.

For example: steplab explain last

Measure the proposed changes: steplab explain --try
"""

from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import OutputOptions, timeout_help


def explain(
    id: Annotated[
        str | None, Parameter(help="Id of the run, or its beginning [default: the newest run with a profile]")
    ] = None,
    /,
    *,
    try_: Annotated[bool, Parameter(name="--try", help="Measure each proposed change on this machine")] = False,
    timeout: Annotated[str, Parameter(help=timeout_help("a measurement of --try"))] = "1h",
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit, emit_document, say
    from steplab.cli.progress import ProgressLine
    from steplab.lab import explaining
    from steplab.lab.turns import try_findings
    from steplab.records.codec import encode
    from steplab.report.profile.verdict import findings_document
    from steplab.units import parse_duration

    timeout_s = parse_duration(timeout)
    chosen = chosen_format(out.format, out)
    run = explaining.run_to_explain(id, store=out.store)
    findings = explaining.explain(run, store=out.store)
    if try_:
        with ProgressLine() as line:
            findings = try_findings(
                run,
                findings,
                store=out.store,
                timeout_s=timeout_s,
                on_progress=line.within,
                on_trial=lambda what: say(f"trying {what}"),
            )
    if chosen == "json":
        emit(encode(findings).decode(), out, chosen)
    else:
        emit_document(findings_document(run, findings), chosen, out)
    tried = [finding.trial for finding in findings.findings if finding.trial]
    if try_ and not tried:
        say("steplab: nothing to try: no finding proposes a change of an option")
    return 1 if tried and all(trial.after_s is None for trial in tried) else 0
