"""Run a study with its progress on standard error, as `sweep` and `study` do."""

from pathlib import Path

from steplab.cli.options import FileOptions
from steplab.cli.output import say
from steplab.cli.progress import ProgressLine
from steplab.errors import UserError
from steplab.lab.sweeping import SweepResult, sweep
from steplab.records.disturbances import disturbances
from steplab.specs.study import StudySpec
from steplab.units import counted


def run_study(study: StudySpec, *, store: Path | None, resume: bool, timeout_s: float) -> SweepResult:
    """Measure the study, and say what was doubtful. Raises KeyboardInterrupt that says how to continue."""
    with ProgressLine() as line:
        try:
            result = sweep(study, store=store, resume=resume, timeout_s=timeout_s, on_progress=line.sweep)
        except KeyboardInterrupt as error:
            kept = "the finished measurements are stored, and the same command with --resume continues"
            raise KeyboardInterrupt(kept) from error
    for refusal in result.refusals:
        say(f"steplab: not measured: {refusal}")
    doubtful = [run.id for run in result.runs if disturbances(run)]
    if doubtful:
        say(
            f"{counted(len(doubtful), 'step')} with a warning; to measure them again when the machine is quiet: "
            f"steplab rm {' '.join(doubtful)} --yes, and then the same command with --resume"
        )
    return result


def submit_study(study: StudySpec, options: str, out: FileOptions, *, resume: bool, timeout_s: float) -> None:
    """Submit the study as a Slurm job, and say where it is heard of. Raises UserError where a report was asked for."""
    from steplab.lab.slurm import slurm_options, submit

    if out.output is not None:
        raise UserError("--slurm does not wait for the report; leave --output out, and use `steplab report` afterwards")
    job = submit(study, slurm_options(options), store=out.store, resume=resume, timeout_s=timeout_s)
    say(f"job {job.job_id} measures {study.name}; its messages: {job.log}")
    say("`steplab report --output page.html` draws what is measured, and the same command with --resume continues")
