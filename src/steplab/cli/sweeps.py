import dataclasses

from steplab.cli.options import OutputOptions, PageOptions, StudyOptions
from steplab.cli.output import chosen_format, emit, say, write_report, write_view
from steplab.cli.progress import ProgressLine
from steplab.lab.choosing import records_to_report
from steplab.lab.sweeping import jobs_of, missing_jobs, sweep
from steplab.records.disturbances import disturbances
from steplab.specs.layout import MOST_PROCESSES
from steplab.specs.question import load_questions
from steplab.specs.study import StudySpec, fitted
from steplab.units import counted, counted_results, parse_duration
from steplab.views.reporting import report


def run_study(study: StudySpec, how: StudyOptions, out: OutputOptions | PageOptions) -> int:
    """Measure the study, list doubtful records, write the report, and return the exit code.

    Raises KeyboardInterrupt with the command that continues.
    """
    if how.dry_run:
        return _list_jobs(study, how.resume, out)
    timeout_s = parse_duration(how.timeout)
    if study.questions:
        load_questions(study.questions)  # a wrong file is refused before hours of measuring
    chosen = chosen_format(out.format, out)
    with ProgressLine(resume=how.resume) as line:
        try:
            result = sweep(study, store=out.store, resume=how.resume, timeout_s=timeout_s, on_progress=line.sweep)
        except KeyboardInterrupt as error:
            kept = "finished measurements are stored; add --resume to continue"
            raise KeyboardInterrupt(kept) from error
    for refusal in result.refusals:
        say(f"steplab: not measured: {refusal}")
    doubtful = [run.id for run in result.runs if disturbances(run)]
    if doubtful:
        say(
            f"{counted(len(doubtful), 'step')} with a warning; repeat on a quiet machine: "
            f"steplab rm {' '.join(doubtful)} --yes, then the same command with --resume"
        )
    if study.questions:
        view = report(study=result.study_id, questions=study.questions, store=out.store)
        write_view(view, chosen, out)
    else:
        write_report(records_to_report(study=result.study_id, store=out.store), chosen, out)
    summary = counted_results(result.num_measured, "measurement", result.num_failed)
    again = "" if chosen == "html" else f"; `steplab report --study {result.study_id} --output page.html` draws it"
    say(f"study {result.study_id}: {summary}{again}")
    return 1 if result.num_failed >= result.num_measured else 0


def _list_jobs(study: StudySpec, resume: bool, out: OutputOptions | PageOptions) -> int:
    most = max(one.gpus for one in (study, *study.includes))
    needs = f"; they need {counted(most, 'GPU')}" if most else ""
    jobs = jobs_of(fitted(study, MOST_PROCESSES))  # as on a machine with enough GPUs
    listed, told = jobs, f"{counted(len(jobs), 'measurement')}, none made"
    if resume:
        listed = missing_jobs(study, store=out.store)
        told = f"{len(listed)} of {counted(len(jobs), 'measurement')} are missing, none made now"
    if listed:
        emit("\n".join(job.what for job in listed), dataclasses.replace(out, output=None))
    say(told + needs)
    return 0
