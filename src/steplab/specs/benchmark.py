"""Declares a benchmark: fields of its cells, and other options. Command line, study tables, Python arguments and errors
derive from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from steplab.errors import UserError
from steplab.specs.layout import DEVICES_TOLD, check_device
from steplab.specs.step_fields import Declared, Fields, StepField, check_declared, declared_fields

Options = TypeVar("Options")
DEVICE = Declared(help=f"Device: {DEVICES_TOLD}", check=check_device)
GPUS = Declared(help="Processes to start, each on its own GPU (NCCL)", group="processes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Processes to start; torchrun starts them itself."""

    gpus: int | None = GPUS.field(None)
    """Number of processes, each on its own GPU."""
    processes: int | None = Declared(help="Processes to start on the CPU (gloo)", group="processes").field(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """The options of `steplab doctor`."""

    device: str = DEVICE.field("auto")
    """Device to examine."""


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[Options]):
    """Declaration of a benchmark command."""

    name: str
    """Name of the command, and of the table in a study."""
    what: str
    """Words for the benchmark in a study's list of measurements."""
    timeout: str
    """Default timeout of a cell, in total or without progress: 90s, 5min, 2h."""
    cells: Mapping[str, StepField]
    """Fields of a cell, by name."""
    options: type[Options]
    """Dataclass of the options outside cells."""

    @property
    def own(self) -> Fields:
        return declared_fields(self.options)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({*self.cells, *(field.key for field in self.own)})

    def asked(self, given: Mapping[str, object]) -> tuple[dict[str, object], Options]:
        """Split the given values into fields of cells and options. Raises UserError for an invalid option."""
        known = {name: field.attribute for field in self.own for name in (field.attribute, field.key)}
        fields = {name: value for name, value in given.items() if name not in known}
        options = self.options(**{known[name]: value for name, value in given.items() if name in known})
        check_declared(self.own, options)
        return fields, options

    def of_table(self, table: Mapping[str, object]) -> dict[str, object]:
        """A study's table with its options converted. Raises UserError for an unknown name or a wrong type."""
        options, known, found = {field.key: field for field in self.own}, self.names, dict[str, object]()
        for name, value in table.items():
            if name not in known:
                raise UserError(f"[[{self.name}]] has no option '{name}'; choose one of {', '.join(sorted(known))}")
            if name in options:
                value = _read(f"[[{self.name}]] {name}", value, options[name].annotation)
            found[name] = value
        return found


DOCTOR = Benchmark(name="doctor", what="the machine's ceilings", timeout="10min", cells={}, options=DoctorOptions)


def _read(what: str, value: object, wanted: Any) -> object:
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        try:
            return msgspec.convert([value], wanted)
        except msgspec.ValidationError:
            raise UserError(f"{what} has the wrong type: {error}") from error


def sampling(repeats: int | None) -> dict[str, Any]:
    return {} if repeats is None else {"least_repeats": repeats, "most_repeats": repeats}
