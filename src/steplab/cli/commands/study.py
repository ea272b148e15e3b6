"""Run a whole study as one job that can be resumed: steps, profiles, memory, precision and benchmarks; and report it.

Presets: quick measures any machine in a few minutes; single-gpu, multi-gpu and full measure GPUs; assignment is
reported question by question; sizes, compiled, warmup and attention are the tables of one question each. A TOML file of
your own serves as well. Options of the step replace those of every step in it.

For example: steplab study quick --output page.html
"""

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from steplab.cli.options import PageOptions, StepOptions, StudyOptions


def study(
    study: Annotated[str, Parameter(help="Preset or TOML file")],
    /,
    *,
    step: StepOptions = StepOptions(),
    name: Annotated[
        str | None, Parameter(help="Name of the study in listings [default: that of the preset or the file]")
    ] = None,
    how: StudyOptions = StudyOptions(),
    dry_run: Annotated[
        bool,
        Parameter(help="List the measurements without making them; with --resume, those that are missing", negative=""),
    ] = False,
    out: PageOptions = PageOptions(),
) -> int:
    from steplab.cli.output import emit, say
    from steplab.cli.sweeps import run_study
    from steplab.lab.sweeping import jobs_of, missing_jobs
    from steplab.specs.layout import MOST_PROCESSES
    from steplab.specs.study import fitted, load_study
    from steplab.units import counted

    asked = load_study(study, step.grid())
    if name:
        asked = dataclasses.replace(asked, name=name)
    if dry_run:
        most = max(one.gpus for one in (asked, *asked.includes))
        needs = f"; all of them need {counted(most, 'GPU')}" if most else ""
        jobs = jobs_of(fitted(asked, MOST_PROCESSES))  # as if there were GPUs for all of it
        listed, told = jobs, f"{counted(len(jobs), 'measurement')}, none made"
        if how.resume:
            listed = missing_jobs(asked, store=out.store)
            told = f"{len(listed)} of {counted(len(jobs), 'measurement')} are missing, none made now"
        emit("\n".join(job.what for job in listed), dataclasses.replace(out, output=None))
        say(told + needs)
        return 0
    return run_study(asked, how, out)
