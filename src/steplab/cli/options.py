"""The options that commands share, by the same names everywhere.

The options of a step are made from the declarations in `specs.step_choices`. Values stay text here; `specs.resolve`
turns them into a spec, so that study files, Python and the command line share the same checks and messages.
"""

import difflib
import shlex
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from cyclopts import Group, Parameter

from steplab.errors import UserError
from steplab.limits import OPTION, Limits
from steplab.specs.changes import recipe_help, resolve_with_recipe
from steplab.specs.step import FIELDS
from steplab.specs.step_fields import StepField, option_name
from steplab.units import parse_duration

if TYPE_CHECKING:
    from steplab.specs.step import StepSpec
    from steplab.specs.study import Grid

STEP = Group.create_ordered("The step")
SPREAD = Group.create_ordered("Several processes")
_SIZES = Group.create_ordered("Sizes that replace those of a built-in model")
_OUTPUT = Group.create_ordered("Store and output")

Format = Literal["table", "json", "csv", "md", "latex"]
PageFormat = Literal["table", "json", "csv", "md", "latex", "html"]
_FORMAT_HELP = "Format of the output [default: by the suffix of --output, else table]"
Recipe = Annotated[Literal["fast"] | None, Parameter(name="--recipe", help=recipe_help(), group=STEP)]


_GROUPS = {"step": STEP, "processes": SPREAD, "sizes": _SIZES}

_Class = TypeVar("_Class", bound=type)


_NOTHING: Mapping[str, str] = types.MappingProxyType({})


def field_options(
    declared: Collection[StepField], group: Group | None = None, changed: Mapping[str, str] = _NOTHING
) -> Callable[[_Class], _Class]:
    """Add an option for each of these fields to a subclass of GivenFields that is about to become a dataclass.

    They are listed under `group`; None: under the heading that each declares. `changed` replaces declared help texts,
    by the name of the field.
    """

    def add(options: _Class) -> _Class:
        options.declared = tuple(declared)  # type: ignore[attr-defined]
        options.__annotations__ = {}
        for field in declared:
            option = Parameter(
                name=option_name(field.key),
                help=changed.get(field.key, field.help),
                group=group or _GROUPS[field.about.group],
            )
            kind = bool if field.type is bool else str
            options.__annotations__[field.attribute] = Annotated[kind | None, option]
            setattr(options, field.attribute, None)
        return options

    return add


def step_options(without: Collection[str] = (), changed: Mapping[str, str] = _NOTHING) -> Callable[[_Class], _Class]:
    """The same for the fields of a step, but those in `without`."""
    return field_options([field for field in FIELDS.values() if field.key not in without], changed=changed)


class GivenFields:
    """The options that were given of a step, whose other fields specs.resolve decides, or of a benchmark's cells, which
    are all their combinations."""

    declared: ClassVar[tuple[StepField, ...]] = ()
    """The fields that have options."""

    def fields(self, without: Collection[str] = ()) -> dict[str, object]:
        """One value per given field, without those in `without`, for resolve_step."""
        given = {field: value for field, value in self._given().items() if field.key not in without}
        for field, value in given.items():
            if "," in value and not field.about.parse:
                name = option_name(field.key)
                lists = "`steplab sweep` and `steplab plan steps` take lists"
                raise UserError(f"{name} takes a single value here, not '{value}'; {lists}")
        return {field.key: value for field, value in given.items()}

    def grid(self) -> "Grid":
        """A list of values per given field, for a study or a benchmark."""
        return {
            field.key: [value]
            if field.about.parse or not isinstance(value, str)
            else [part.strip() for part in value.split(",")]
            for field, value in self._given().items()
        }

    def _given(self) -> dict[StepField, Any]:
        values = {field: getattr(self, field.attribute) for field in self.declared}
        return {field: value for field, value in values.items() if value is not None}


def fields_in(text: str) -> dict[str, object]:
    """The fields of a step that options in one text give, such as '--precision bf16 --compile block'.

    Raises UserError for anything else than options of a step, each with a value.
    """
    try:
        words = [part for word in shlex.split(text) for part in _apart(word)]
    except ValueError as error:
        raise UserError(f"'{text}' cannot be read as options: {error}") from None
    keys = {option_name(key): key for key in FIELDS}
    for option in words[::2]:
        if option not in keys:
            near = difflib.get_close_matches(option, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else "write it as '--precision bf16 --compile block'"
            raise UserError(f"'{option}' in '{text}' is no option of a step; {hint}")
    if len(words) % 2:
        raise UserError(f"{words[-1]} in '{text}' has no value")
    return {keys[option]: value for option, value in zip(words[::2], words[1::2], strict=True)}


def _apart(word: str) -> list[str]:
    """An option and its value, if they are one word."""
    return word.split("=", 1) if word.startswith("--") else [word]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@step_options()
class StepOptions(GivenFields):
    """The step that is measured. `sweep` takes a list for each option: --context 128,256."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How many processes measure together. Under torchrun neither option is needed, because it has started them."""

    gpus: Annotated[
        int | None,
        Parameter(
            name="--gpus",
            help="Number of processes to start, each on its own GPU; they communicate through NCCL",
            group=SPREAD,
        ),
    ] = None
    processes: Annotated[
        int | None,
        Parameter(
            name="--processes",
            help="Number of processes to start on the CPU; they communicate through gloo",
            group=SPREAD,
        ),
    ] = None

    def as_layout(self) -> str | None:
        """The options of a step that start as many processes on the CPU; None where --processes is not given."""
        if self.gpus is not None:
            return f"--layout dp={self.gpus}"
        return f"--layout dp={self.processes} --device cpu" if self.processes is not None else None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """The step that is measured by `run`, `profile` and `memory`, its processes, and the name of the record."""

    step: StepOptions = StepOptions()
    recipe: Recipe = None
    processes: ProcessOptions = ProcessOptions()
    name: Annotated[str, Parameter(help="Name of the run in listings")] = ""
    timeout: Annotated[
        str | None, Parameter(help="Time after which the measurement is given up: 90s, 5min, 2h [default: none]")
    ] = None

    def spec(self) -> "StepSpec":
        """The step as it is measured here. Raises UserError for a request that is not valid."""
        from steplab.lab.machine import device_kind_here
        from steplab.lab.processes import fields_here

        fields = self.step.fields() | {"recipe": self.recipe}
        return resolve_with_recipe(fields_here(fields, self.processes.gpus, self.processes.processes), device_kind_here)

    def timeout_s(self) -> float | None:
        """The time after which the measurement is given up. Raises UserError for a text that is no time."""
        return parse_duration(self.timeout) if self.timeout else None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """How the measurements of `sweep` and `study` are made."""

    resume: Annotated[
        bool,
        Parameter(help="Continue the newest study of the same measurements; make only those missing", negative=""),
    ] = False
    timeout: Annotated[str, Parameter(help="Time after which a measurement is given up: 90s, 5min, 2h")] = "1h"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How much reading a file from outside may take."""

    raise_limits: Annotated[
        float,
        Parameter(
            name=OPTION,
            help="Allow this many times the usual memory and time for reading the file",
        ),
    ] = 1.0

    def limits(self) -> Limits:
        """The limits. Raises UserError for a factor out of range."""
        return Limits().times(self.raise_limits)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where records are stored."""

    store: Annotated[
        Path | None,
        Parameter(help="Path of the store [default: $STEPLAB_STORE, else the XDG data folder]", group=_OUTPUT),
    ] = None
    debug: Annotated[
        bool, Parameter(help="Show the traceback of an error", negative="", group=_OUTPUT, show_default=False)
    ] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FileOptions(StoreOptions):
    """Where records are stored, and the file that a command writes."""

    output: Annotated[Path | None, Parameter(help="Write to this file instead of standard output", group=_OUTPUT)] = (
        None
    )
    force: Annotated[
        bool,
        Parameter(
            help="Replace a file even if it does not name steplab as its writer. The store is never replaced.",
            negative="",
            group=_OUTPUT,
            show_default=False,
        ),
    ] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputOptions(FileOptions):
    """Where records are stored, and how they are shown."""

    format: Annotated[Format | None, Parameter(help=_FORMAT_HELP, group=_OUTPUT)] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PageOptions(FileOptions):
    """Where records are stored, and how they are shown, which may be as a page."""

    format: Annotated[PageFormat | None, Parameter(help=_FORMAT_HELP, group=_OUTPUT)] = None
