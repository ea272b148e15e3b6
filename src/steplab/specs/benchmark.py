"""The declaration of a benchmark: the fields of its cells, and its other options. The command's options, the keys of a
study's table, the arguments of the Python function, and the errors about them follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from steplab.errors import UserError
from steplab.specs.layout import DEVICES_TOLD
from steplab.specs.step_fields import Declared, Fields, StepField, declared_fields

Options = TypeVar("Options")
Device = Annotated[str, Declared(help=f"Device: {DEVICES_TOLD}")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How many processes measure together; torchrun has started them already."""

    gpus: Annotated[int | None, Declared(help="Processes to start, each on its own GPU (NCCL)", group="processes")] = (
        None
    )
    processes: Annotated[int | None, Declared(help="Processes to start on the CPU (gloo)", group="processes")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """The options of `steplab doctor`."""

    device: Device = "auto"
    """The device that is examined."""


@dataclass(frozen=True, kw_only=True)
class Benchmark(Generic[Options]):
    """One benchmark, by the name of its command."""

    name: str
    """Name of the command, and of the table in a study."""
    what: str
    """Its name among the measurements of a study."""
    timeout: str
    """Default timeout of a cell, or of a cell without progress: 90s, 5min, 2h."""
    cells: Mapping[str, StepField]
    """The fields of its cells, by their names."""
    options: type[Options]
    """The dataclass of its other options."""

    @property
    def own(self) -> Fields:
        return declared_fields(self.options)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({*self.cells, *(field.key for field in self.own)})

    def asked(self, given: Mapping[str, object]) -> tuple[dict[str, object], Options]:
        known = {name: field.attribute for field in self.own for name in (field.attribute, field.key)}
        fields = {name: value for name, value in given.items() if name not in known}
        return fields, self.options(**{known[name]: value for name, value in given.items() if name in known})

    def of_table(self, table: Mapping[str, object]) -> dict[str, object]:
        """Raises UserError for an invalid name or type of an option."""
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
    import msgspec  # `--help` does without it

    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        try:
            return msgspec.convert([value], wanted)
        except msgspec.ValidationError:
            raise UserError(f"{what} has the wrong type: {error}") from error


def sampling(repeats: int | None) -> dict[str, Any]:
    return {} if repeats is None else {"least_repeats": repeats, "most_repeats": repeats}


def check_sampling(study: Any) -> None:
    for name in ("warmup_s", "measured_s"):
        if not 0 <= getattr(study, name) < float("inf"):
            raise UserError(f"{name} must be a time, not {getattr(study, name)}")
    if not 1 <= study.least_repeats <= study.most_repeats:
        raise UserError("the number of repeats must be at least 1")
