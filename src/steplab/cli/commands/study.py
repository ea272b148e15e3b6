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
    out: PageOptions = PageOptions(),
) -> int:
    from steplab.cli.sweeps import run_study
    from steplab.specs.study import load_study

    asked = load_study(study, step.grid())
    if name:
        asked = dataclasses.replace(asked, name=name)
    return run_study(asked, how, out)
