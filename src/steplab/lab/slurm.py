"""Submit a study to Slurm through submitit, as one job that measures all of it on one machine."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.errors import SteplabError, UserError
from steplab.lab.sweeping import SweepResult, sweep
from steplab.specs.study import StudySpec
from steplab.store.location import default_path
from steplab.units import parse_duration

_COMMON = ("nodes", "gpus_per_node", "cpus_per_task", "mem_gb")
"""Options that submitit knows for every cluster; others are sbatch's, in which hyphens become underscores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A job that was submitted."""

    job_id: str
    """Id of the job."""
    log: Path
    """File that its messages go to."""
    job: Any
    """The submitit.Job."""


@dataclass(frozen=True, kw_only=True)
class StudyJob:
    """What the job does; submitit sends it to the machine that measures."""

    study: StudySpec
    """The study."""
    store: str
    """Path of the store, which that machine must see too."""
    resume: bool
    """Whether to continue an earlier study of the same measurements."""
    timeout_s: float
    """Time limit of one measurement."""

    def __call__(self) -> SweepResult:
        return sweep(self.study, store=self.store, resume=self.resume, timeout_s=self.timeout_s)

    def checkpoint(self) -> Any:
        """What submitit queues when the job is preempted or reaches its time limit: the same, continued."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(dataclasses.replace(self, resume=True))


def slurm_options(text: str) -> dict[str, str]:
    """The options in a text such as partition=gpu,gpus-per-node=2,time=4h. Raises UserError for another text."""
    found = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not (name and equals and value):
            raise UserError(f"--slurm takes options of sbatch, as partition=gpu,gpus-per-node=1,time=4h, not '{part}'")
        found[name.replace("-", "_")] = value
    return found


def submit(
    study: StudySpec,
    options: Mapping[str, str],
    *,
    store: Path | str | None = None,
    resume: bool = False,
    timeout_s: float,
) -> Submitted:
    """Submit one job that makes the study's measurements, one after the other, into the store; it is not waited for.

    `options` are those of sbatch; `time` is a duration such as 4h, and `cluster` may be `local`, a process on this
    machine. A job that is preempted or reaches its time limit is queued again by submitit, and continues the study.
    Messages of the job go to a folder `slurm` beside the store. Raises UserError for an option that submitit does not
    take or a value that it cannot, and SteplabError without submitit or Slurm.
    """
    try:
        import submitit
    except ImportError as error:
        raise SteplabError("--slurm needs submitit; install it with `pip install 'steplab[slurm]'`") from error
    given = dict(options)
    path = (Path(store) if store else default_path()).absolute()
    folder = path.parent / "slurm"
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=given.pop("cluster", "slurm"))
        executor.update_parameters(name=f"steplab-{study.name}", **_parameters(given))
        job = executor.submit(StudyJob(study=study, store=str(path), resume=resume, timeout_s=timeout_s))
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"--slurm: {error}") from error
    except (RuntimeError, OSError, submitit.core.utils.FailedSubmissionError) as error:
        raise SteplabError(f"the job was not submitted: {error}") from error
    return Submitted(job_id=str(job.job_id), log=job.paths.stderr, job=job)


def _parameters(options: Mapping[str, str]) -> dict[str, object]:
    """Options of sbatch as parameters of submitit."""
    found: dict[str, object] = {}
    for name, value in options.items():
        if name == "time":
            found["timeout_min"] = max(1, round(parse_duration(value) / 60))
        elif name in _COMMON:
            found[name] = float(value) if name == "mem_gb" else int(value)
        else:
            found[f"slurm_{name}"] = value
    return found
