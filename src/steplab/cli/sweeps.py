"""Run a study with its progress on standard error, and report it, as `sweep` and `study` do."""

from steplab.cli.options import OutputOptions, PageOptions, StudyOptions
from steplab.cli.output import chosen_format, say, write_answers, write_report
from steplab.cli.progress import ProgressLine
from steplab.lab.choosing import records_to_report
from steplab.lab.sweeping import sweep
from steplab.records.disturbances import disturbances
from steplab.specs.study import StudySpec
from steplab.units import counted, counted_results, parse_duration


def run_study(study: StudySpec, how: StudyOptions, out: OutputOptions | PageOptions) -> int:
    """Measure the study, say what was doubtful, and write its report; gives the exit code.

    Raises KeyboardInterrupt that says how to continue.
    """
    timeout_s = parse_duration(how.timeout)
    chosen = chosen_format(out.format, out)
    with ProgressLine(resume=how.resume) as line:
        try:
            result = sweep(study, store=out.store, resume=how.resume, timeout_s=timeout_s, on_progress=line.sweep)
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
    if study.questions:
        write_answers(study.questions, (), chosen, out, study=result.study_id)
    else:
        write_report(records_to_report(study=result.study_id, store=out.store), chosen, out)
    summary = counted_results(result.num_measured, "measurement", result.num_failed)
    again = "" if chosen == "html" else f"; `steplab report --study {result.study_id} --output page.html` draws it"
    say(f"study {result.study_id}: {summary}{again}")
    return 1 if result.num_failed >= result.num_measured else 0
