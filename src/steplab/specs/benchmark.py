"""A benchmark as it is declared: the fields of what it measures, and the options of the whole.

The options of the command of its name, the keys of its table in a study's file, the arguments of its function in
Python, and the errors about them follow from the declaration.
"""

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
    """How many processes measure together. Under torchrun neither is needed, because it has started them."""

    gpus: Annotated[
        int | None,
        Declared(
            help="Number of processes to start, each on its own GPU; they communicate through NCCL", group="processes"
        ),
    ] = None
    processes: Annotated[
        int | None,
        Declared(help="Number of processes to start on the CPU; they communicate through gloo", group="processes"),
    ] = None


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
    """What it is called among the measurements of a study."""
    timeout: str
    """How long a cell may take, or go without progress, unless another time is given: 90s, 5min, 2h."""
    cells: Mapping[str, StepField]
    """The fields of what it measures, by their names."""
    options: type[Options]
    """The dataclass of its other options."""

    @property
    def own(self) -> Fields:
        """The declarations of its other options."""
        return declared_fields(self.options)

    @property
    def names(self) -> frozenset[str]:
        """The names of all that can be given, without earlier names."""
        return frozenset({*self.cells, *(field.key for field in self.own)})

    def asked(self, given: Mapping[str, object]) -> tuple[dict[str, object], Options]:
        """The fields among what is given, by whatever name, and the options, of which those left out have defaults."""
        known = {name: field.attribute for field in self.own for name in (field.attribute, field.key)}
        fields = {name: value for name, value in given.items() if name not in known}
        return fields, self.options(**{known[name]: value for name, value in given.items() if name in known})

    def of_table(self, table: Mapping[str, object]) -> dict[str, object]:
        """What a table of a study gives, options in a list if one is wanted. Raises UserError for a name or a type of
        an option that is not valid."""
        options, known, found = {field.key: field for field in self.own}, self.names, dict[str, object]()
        earlier = {field.about.earlier: field.key for field in self.own}
        for given, value in table.items():
            name = earlier.get(given, given)
            if name not in known:
                raise UserError(f"[[{self.name}]] has no option '{given}'; choose one of {', '.join(sorted(known))}")
            if name != given and name in table:
                raise UserError(f"[[{self.name}]] has {name} and, by its earlier name, {given}; leave {given} out")
            if name in options:
                value = _read(f"[[{self.name}]] {given}", value, options[name].annotation)
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
            raise UserError(f"{what} is of another type than it should be: {error}") from error


def sampling(repeats: int | None) -> dict[str, Any]:
    """Fields of a study whose cells are repeated that often; None: as its defaults say."""
    return {} if repeats is None else {"least_repeats": repeats, "most_repeats": repeats}


def check_sampling(study: Any) -> None:
    """Raise UserError for a time or a number of repeats of a study that is not valid."""
    for name in ("warmup_s", "measured_s"):
        if not 0 <= getattr(study, name) < float("inf"):
            raise UserError(f"{name} must be a time, not {getattr(study, name)}")
    if not 1 <= study.least_repeats <= study.most_repeats:
        raise UserError("the number of repeats must be at least 1")
