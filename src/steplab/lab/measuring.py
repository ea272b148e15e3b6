"""Measure one step and store its record."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from steplab.errors import UserError
from steplab.lab.checkpointing import choose_checkpointing, with_notes
from steplab.lab.keeping import Place, checked_name, keep, open_store
from steplab.lab.machine import device_kind_here, fields_here, is_first_rank, let_the_first_store, spread_here
from steplab.lab.utilization import with_utilizations
from steplab.measurement.jobs import StepTask
from steplab.measurement.processes.launch import measure_in_child
from steplab.measurement.progress import OnProgress
from steplab.records.run import Run
from steplab.specs.changes import resolve_with_recipe
from steplab.specs.step import StepSpec
from steplab.store.database import Store


def measure(
    spec: StepSpec | str | None = None,
    *,
    name: str = "",
    store: Path | str | None = None,
    timeout_s: float | None = None,
    on_progress: OnProgress = lambda progress: None,
    place: Place | None = None,
    **fields: object,
) -> Run:
    """Measure one training step in a separate process, and store the record.

    `spec` is a whole StepSpec, or the name of a model (a size, hf:PATH/config.json, package.module:function), with the
    other fields as keywords, as on the command line (`pass` is spelled `pass_name`, sizes go in a mapping); `steplab
    run --help` lists them:

        run = steplab.measure("small", context=256, precision="bf16")
        run = steplab.measure("tiny", **{"model.num_layers": 4})
        run = steplab.measure("small", context=256, recipe="fast")  # precision, compile and others too

    A layout of several processes starts them. Under torchrun each process makes this call, and rank 0 stores.

    A failed measurement (out of memory, a crash, a timeout) is a record too: see `run.failure`. Raises UserError for an
    unsupported request, SteplabError if the store cannot be written.
    """
    given = fields if isinstance(spec, StepSpec) else fields_here(fields)
    chosen, name = choose_checkpointing(spread_here(asked_step("measure", spec, given))), checked_name(name)
    asked = chosen.spec
    if not is_first_rank():
        run = measure_in_child(StepTask(spec=asked), timeout_s=timeout_s)
        if run.failure:
            let_the_first_store()
        return with_notes(dataclasses.replace(run, name=name), chosen.notes)
    with open_store(store, write=True) as opened:
        run = measure_in_child(StepTask(spec=asked), timeout_s=timeout_s, on_progress=on_progress)
        return keep(opened, completed(run, name, chosen.notes, opened), place)


def completed(run: Run, name: str, notes: Sequence[str], store: Store) -> Run:
    run = with_utilizations(dataclasses.replace(run, name=name), store)
    return dataclasses.replace(run, notes=(*run.notes, *notes))


def asked_step(
    caller: str,
    spec: StepSpec | str | None,
    fields: Mapping[str, object],
    device_kind: Callable[[str], str] = device_kind_here,
) -> StepSpec:
    """The step of a StepSpec or of fields. `device_kind` maps a device's name to its kind, on which recipes depend.
    Raises UserError for an invalid request.
    """
    if isinstance(spec, StepSpec):
        if fields:
            raise UserError(f"{caller} takes either a StepSpec or fields, not both; leave out {', '.join(fields)}")
        return spec
    return resolve_with_recipe(named_fields(spec, fields), device_kind)


def named_fields(model: str | None, fields: Mapping[str, object]) -> dict[str, object]:
    named: dict[str, object] = {"model": model} if model is not None else {}
    return named | {("pass" if name == "pass_name" else name): value for name, value in fields.items()}
