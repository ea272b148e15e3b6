"""Run a study of steps, profiles, memory, precision and benchmarks as one job, and report it.

Presets: quick (minutes on any machine); single-gpu, multi-gpu, full (GPUs); assignment (reported by question); sizes,
compiled, warmup, attention (one question each). A TOML file works too. Step options override the study's.

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
    name: Annotated[str | None, Parameter(help="Name in listings [default: the preset's or file's]")] = None,
    how: StudyOptions = StudyOptions(),
    dry_run: Annotated[
        bool,
        Parameter(help="Only list the measurements; with --resume, the missing ones", negative=""),
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
        needs = f"; they need {counted(most, 'GPU')}" if most else ""
        jobs = jobs_of(fitted(asked, MOST_PROCESSES))  # as if there were GPUs for all of it
        listed, told = jobs, f"{counted(len(jobs), 'measurement')}, none made"
        if how.resume:
            listed = missing_jobs(asked, store=out.store)
            told = f"{len(listed)} of {counted(len(jobs), 'measurement')} are missing, none made now"
        emit("\n".join(job.what for job in listed), dataclasses.replace(out, output=None))
        say(told + needs)
        return 0
    return run_study(asked, how, out)
