"""Check predictions of time and memory against the runs of a store and against published steps, and fit the rates to
them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from steplab.errors import UserError
from steplab.lab.keeping import open_store
from steplab.plan.check import check_rows, check_runs
from steplab.plan.fitting import fit_gpu
from steplab.plan.public import PublicRow, read_rows
from steplab.plan.rates import GpuRates, as_toml, fitted_rates, fitted_stacks
from steplab.plan.seen import is_held_out, parsed_hold_out
from steplab.plan.stack_fit import fit_stacks
from steplab.records.attention import AttentionRun
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.records.time_check import TimeCheck
from steplab.specs.hardware import HardwareSpec, hardware_named
from steplab.unpacking import small_file


def check_plan(store: Path | None = None, table: Path | None = None) -> list[TimeCheck]:
    """Every run of the store, or every row of a table of published steps, beside its prediction.

    table: JSON as benchmarks/public_training.json.xz, plain or compressed. Raises UserError where there is nothing to
    check, or the table cannot be read.
    """
    if table is not None:
        return check_rows(read_table(table))
    with open_store(store, write=False) as opened:
        runs = [record for record in opened.iterate(kind="run") if isinstance(record, Run)]
    found = check_runs(runs)
    if not found:
        raise UserError("the store has no measured step on a GPU; import some with `steplab import`, or give --table")
    return found


def read_table(path: Path) -> list[PublicRow]:
    """The rows of a table of published steps. Raises UserError for a file that is none."""
    try:
        return read_rows(small_file(path), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def fitted_table(gpu: str, hold_out: str, store: Path | None = None, table: Path | None = None) -> str:
    """The file of the committed rates, with one part fitted anew: the GPU's, or with a table of published steps, those
    of their sources; hold_out: fields and values as text. Raises as `fit_rates` and plan_checking.read_table do."""
    if table is not None:
        return as_toml(fitted_rates(), fit_stacks(read_table(table)))
    return as_toml(fit_rates(gpu, parsed_hold_out(hold_out), store), fitted_stacks())


def fit_rates(gpu: str, held_out: Mapping[str, Sequence[str]], store: Path | None = None) -> list[GpuRates]:
    """The committed table of rates, with those of one GPU fitted anew to the store's records of it.

    held_out: values of fields of a step whose records are left out, to be checked against later. Raises UserError for
    an unknown GPU, and where the store lacks what a fit needs.
    """
    hardware = hardware_named(gpu)
    records = [record for record in records_of(hardware, store) if not _is_held_out(record, held_out)]
    if not records:
        raise UserError(f"the store has no record of {hardware.name}; import some with `steplab import`")
    runs = sum(isinstance(record, Run) for record in records)
    until = max(record.created_utc for record in records)
    source = f"{runs} steps and {len(records) - runs} benchmarks of attention on {hardware.name}, until {until[:10]}"
    table = fitted_rates()
    before = next((each for each in table if each.name == hardware.name), table[0])
    rates = fit_gpu(records, hardware, source, before.step.spread["elsewhere"])
    own = msgspec.structs.replace(
        rates, until_utc=until, held_out={name: list(values) for name, values in held_out.items()}
    )
    return [own, *(each for each in table if each.name != hardware.name)]


def records_of(hardware: HardwareSpec, store: Path | None = None) -> list[Record]:
    """The steps and the benchmarks of attention that were measured on a GPU, the oldest first."""
    with open_store(store, write=False) as opened:
        records = [record for record in opened.iterate() if isinstance(record, (Run, AttentionRun))]
    own = [r for r in records if r.environment and r.environment.device.name in hardware.device_names]
    return sorted(own, key=lambda record: (record.created_utc, record.id))


def _is_held_out(record: Record, held_out: Mapping[str, Sequence[str]]) -> bool:
    return isinstance(record, Run) and record.spec is not None and is_held_out(record.spec, held_out)
