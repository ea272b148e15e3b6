"""Predict the memory of a step, without torch and without a GPU."""

from cyclopts import App

from steplab.cli.options import OutputOptions, StepOptions

plan = App(name="plan", help_format="plaintext")


@plan.command
def memory(*, step: StepOptions = StepOptions(), out: OutputOptions = OutputOptions()) -> None:
    """Predict the peak memory of a step on a CUDA device, with everything that it consists of.

    Nothing is allocated and nothing is stored: the step is run dry, operator
    by operator, with a model of torch's allocator. Each summand is shown with
    its formula, followed by the GPUs that the step fits. Besides the sizes
    below there is xxl, for which only a lower bound is predicted.

    For example: steplab plan memory --model 2.7b --context 512 --precision bf16
    """
    import msgspec

    from steplab.cli.output import chosen_format, emit, stdout_color
    from steplab.lab.planning import plan_memory
    from steplab.report.kit.rendering import render
    from steplab.report.plan.document import plan_document
    from steplab.specs.resolve import resolve_step

    spec = resolve_step(step.fields())
    chosen = chosen_format(out.format, out)
    prediction = plan_memory(spec)
    if chosen == "json":
        emit(msgspec.json.format(msgspec.json.encode(prediction)).decode(), out, chosen)
    else:
        document = plan_document(spec, prediction)
        emit(render(document, chosen, color=stdout_color() and out.output is None), out, chosen)
