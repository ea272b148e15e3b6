"""Run a whole study as one job that can be resumed: steps, profiles, memory, precision and benchmarks; and report it.

Presets: quick measures any machine in a few minutes; single-gpu, multi-gpu and full measure GPUs; sizes, compiled,
warmup and attention are the tables of one question each. A TOML file of your own serves as well. Options of the step
replace those of every step in it.

For example: steplab study quick --output page.html
"""

import dataclasses
from typing import Annotated, Literal

from cyclopts import Parameter

from steplab.cli.options import FileOptions, StepOptions


def study(
    study: Annotated[str, Parameter(help="Preset or TOML file")],
    /,
    *,
    step: StepOptions = StepOptions(),
    name: Annotated[
        str | None, Parameter(help="Name of the study in listings [default: that of the preset or the file]")
    ] = None,
    resume: Annotated[
        bool,
        Parameter(help="Continue the newest study of the same measurements; make only those missing", negative=""),
    ] = False,
    timeout: Annotated[str, Parameter(help="Time after which a measurement is given up: 90s, 5min, 2h")] = "1h",
    slurm: Annotated[
        str | None,
        Parameter(
            help="Submit all of it as one Slurm job with these options of sbatch, and do not wait: "
            "partition=gpu,gpus-per-node=1,time=4h (extra: steplab[slurm])"
        ),
    ] = None,
    dry_run: Annotated[bool, Parameter(help="List the measurements without making them", negative="")] = False,
    format: Annotated[
        Literal["table", "json", "csv", "md", "latex", "html"] | None,
        Parameter(help="Format of the report [default: by the suffix of --output, else table]"),
    ] = None,
    out: FileOptions = FileOptions(),
) -> int:
    from steplab.cli.output import ROW_FORMATS, chosen_format, emit, say
    from steplab.cli.sweeps import run_study, submit_study
    from steplab.cli.writing import write_report
    from steplab.lab.reporting import records_to_report
    from steplab.lab.study_parts import jobs_of
    from steplab.specs.layout import MOST_PROCESSES
    from steplab.specs.study import fitted, load_study
    from steplab.units import counted, parse_duration

    asked = load_study(study, step.grid())
    if name:
        asked = dataclasses.replace(asked, name=name)
    timeout_s = parse_duration(timeout)
    if dry_run:
        most = max(one.gpus for one in (asked, *asked.includes))
        needs = f"; all of them need {counted(most, 'GPU')}" if most else ""
        jobs = jobs_of(fitted(asked, MOST_PROCESSES))  # as if there were GPUs for all of it
        emit("\n".join(job.what for job in jobs), dataclasses.replace(out, output=None))
        say(f"{counted(len(jobs), 'measurement')}, none made" + needs)
        return 0
    if slurm is not None:
        submit_study(asked, slurm, out, resume=resume, timeout_s=timeout_s)
        return 0
    chosen = chosen_format(format, out, allowed=(*ROW_FORMATS, "html"))
    result = run_study(asked, store=out.store, resume=resume, timeout_s=timeout_s)
    write_report(records_to_report(study=result.study_id, store=out.store), chosen, out)
    again = "" if chosen == "html" else f"; `steplab report --study {asked.name} --output page.html` draws it"
    summary = f"{counted(result.num_measured, 'measurement')}, {result.num_failed} of them failed"
    say(f"study {result.study_id}: {summary}{again}")
    return 1 if result.num_failed >= result.num_measured else 0
