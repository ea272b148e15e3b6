"""Measure one step, store it, give its record."""

import dataclasses
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.keeping import keep, open_store
from steplab.lab.utilization import with_utilizations
from steplab.measurement.launch import OnProgress, measure_in_child
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec


def measure(
    spec: StepSpec | str | None = None,
    *,
    name: str = "",
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    **fields: object,
) -> Run:
    """Measure one training step in a process of its own, and store the record.

    `spec` is a whole StepSpec, or the name of a model (a size, hf:PATH/config.json, package.module:function), with
    the other fields by name, as on the command line (`pass` is spelled `pass_name`, sizes go in a mapping):

        run = steplab.measure("small", context=256, precision="bf16")
        run = steplab.measure("tiny", **{"model.num_layers": 4})

    A failed measurement (out of memory, a crash, a timeout) is a record too: see `run.failure`. Raises UserError
    for a request that cannot be served, and SteplabError where the store cannot be written.
    """
    if not isinstance(spec, StepSpec):
        named = {"model": spec} if spec is not None else {}
        spec = resolve_step({**named, **{("pass" if k == "pass_name" else k): v for k, v in fields.items()}})
    elif fields:
        raise UserError(f"measure takes a whole StepSpec or fields, not both; leave out {', '.join(fields)}")
    with open_store(store, write=True) as opened:
        run = measure_in_child(spec, timeout_s=timeout_s, on_progress=on_progress)
        run = with_utilizations(dataclasses.replace(run, name=name), opened)
        keep(opened, run)
        return run
