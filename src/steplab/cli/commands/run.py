"""Measure one training step and store the record.

For example: steplab run --model small --context 256 --precision bf16
"""

from steplab.cli.options import MeasurementOptions, OutputOptions


def run(*, measured: MeasurementOptions = MeasurementOptions(), out: OutputOptions = OutputOptions()) -> int:
    from steplab.cli.output import chosen_format, emit_document
    from steplab.cli.progress import measuring_step, say_failed
    from steplab.lab.machine import is_first_rank, is_told_here
    from steplab.lab.measuring import measure
    from steplab.report.runs import REPORT

    spec = measured.spec()
    chosen = chosen_format(out.format, out)
    with measuring_step(spec, measured, out) as how:
        record = measure(spec, **how)
    if is_first_rank():
        emit_document(REPORT.documents([record])[0], chosen, out, stored=record.id)
    if record.failure is None:
        return 0
    if is_told_here(record.failure):
        say_failed(record)
    return 1
