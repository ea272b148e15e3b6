"""Measure one training step and store the record.

For example: steplab run --model small --context 256 --precision bf16

On several GPUs: steplab run --model small --gpus 2 --data-parallel bucketed

On several machines: torchrun --nproc-per-node 8 --nnodes 2 ... -m steplab run --model small
"""

from steplab.cli.options import MeasurementOptions, OutputOptions


def run(
    *,
    measured: MeasurementOptions = MeasurementOptions(),
    out: OutputOptions = OutputOptions(),
) -> int:
    from steplab.cli.output import chosen_format, emit_document, say
    from steplab.cli.progress import ProgressLine
    from steplab.lab.measuring import measure
    from steplab.lab.processes import is_first_rank, is_told_here
    from steplab.report.runs import REPORT

    spec = measured.spec()
    chosen = chosen_format(out.format, out)
    with ProgressLine(num_steps=spec.warmup + spec.steps) as line:
        record = measure(
            spec,
            name=measured.name,
            store=out.store,
            timeout_s=measured.timeout_s(),
            on_progress=line.within,
        )
    if is_first_rank():
        emit_document(REPORT.documents([record])[0], chosen, out, stored=record.id)
    if record.failure is None:
        return 0
    if is_told_here(record.failure):
        say(f"steplab: {record.status.replace('_', ' ')}: {record.failure.message}")
    return 1
