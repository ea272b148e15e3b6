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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, dataclass_transform

from cyclopts import Group, Parameter

from steplab.errors import UserError
from steplab.limits import OPTION, Limits
from steplab.specs.benchmark import Spread
from steplab.specs.changes import recipe_help, resolve_with_recipe
from steplab.specs.step import FIELDS
from steplab.specs.step_fields import StepField, declared_fields, option_name
from steplab.units import parse_duration

if TYPE_CHECKING:
    from steplab.specs.resolve import Grid
    from steplab.specs.step import StepSpec

STEP = Group.create_ordered("The step")
SPREAD = Group.create_ordered("Several processes")
_SIZES = Group.create_ordered("Sizes that replace those of a built-in model")
_OUTPUT = Group.create_ordered("Store and output")
_GROUPS = {
    "step": STEP,
    "processes": SPREAD,
    "sizes": _SIZES,
    "variants": Group.create_ordered("What is compared"),
}

Format = Literal["table", "json", "csv", "md", "latex"]
PageFormat = Literal["table", "json", "csv", "md", "latex", "html"]
QUIET = "Time without progress after which a cell is given up: 90s, 5min, 2h"
_FORMAT_HELP = "Format of the output [default: by the suffix of --output, else table]"
Recipe = Annotated[Literal["fast"] | None, Parameter(name="--recipe", help=recipe_help(), group=STEP)]


_Class = TypeVar("_Class", bound=type)
_NOTHING: Mapping[str, str] = types.MappingProxyType({})


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(cls: _Class) -> _Class:
    """A dataclass whose fields are options of a command, as if they were its own parameters."""
    return cast(_Class, Parameter(name="*")(dataclass(frozen=True, kw_only=True)(cls)))


def field_options(
    declared: Collection[StepField],
    group: Group | None = None,
    changed: Mapping[str, str] = _NOTHING,
    *,
    others: Collection[StepField] = (),
) -> Callable[[_Class], _Class]:
    """Make a subclass of GivenFields have an option for each of these fields, which takes a text or is a flag, and for
    those of the `others`, which take a value of their type.

    The first are listed under `group`; None, and the others: under the heading that each declares. `changed` replaces
    declared help texts, by the name of the field.
    """

    def add(cls: _Class) -> _Class:
        cls.declared, cls.others = tuple(declared), tuple(others)  # type: ignore[attr-defined]
        cls.__annotations__ = {}
        for field in (*declared, *others):
            own = {} if field in others and field.about.group == "step" else {"group": _GROUPS[field.about.group]}
            under: dict[str, Any] = {"group": group} if group and field not in others else own
            names = [option_name(key) for key in (field.key, field.about.earlier) if key]
            option = Parameter(name=names, help=changed.get(field.key, field.help), **under)
            kind = Path if field.about.parse is Path else field.type
            kind = kind if kind is bool or (field in others and kind in (int, Path)) else str
            cls.__annotations__[_attribute(field)] = Annotated[kind | None, option]
            setattr(cls, _attribute(field), None)
        return options(cls)

    return add


def _attribute(field: StepField) -> str:
    return f"given_{field.attribute}"


def step_options(without: Collection[str] = (), changed: Mapping[str, str] = _NOTHING) -> Callable[[_Class], _Class]:
    """The same for the fields of a step, but those in `without`."""
    return field_options([field for field in FIELDS.values() if field.key not in without], changed=changed)


class GivenFields:
    """The options that were given of a step, whose other fields specs.resolve decides, or of a benchmark's cells, which
    are all their combinations."""

    declared: ClassVar[tuple[StepField, ...]] = ()
    """The fields that have options."""
    others: ClassVar[tuple[StepField, ...]] = ()
    """The options of a benchmark beside them."""

    def fields(self, without: Collection[str] = ()) -> dict[str, object]:
        """One value per given field, without those in `without`, for resolve_step."""
        given = {field: value for field, value in self._given(self.declared).items() if field.key not in without}
        for field, value in given.items():
            if "," in value and not field.about.parse:
                name = option_name(field.key)
                lists = "`steplab sweep` and `steplab plan steps` take lists"
                raise UserError(f"{name} takes a single value here, not '{value}'; {lists}")
        return {field.key: value for field, value in given.items()}

    def grid(self) -> "Grid":
        """A list of values per given field, for a study or a benchmark."""
        return {
            field.key: [value] if field.about.parse or not isinstance(value, str) else _parts(value)
            for field, value in self._given(self.declared).items()
        }

    def options(self) -> dict[str, Any]:
        """The given options of a benchmark beside its fields; a list where one takes several values."""
        given = self._given(self.others)
        return {field.key: _parts(value) if field.is_list else value for field, value in given.items()}

    def _given(self, among: Collection[StepField]) -> dict[StepField, Any]:
        values = {field: getattr(self, _attribute(field)) for field in among}
        return {field: value for field, value in values.items() if value is not None}


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


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


@step_options()
class StepOptions(GivenFields):
    """The step that is measured. `sweep` takes a list for each option: --context 128,256."""


@field_options((), others=declared_fields(Spread))
class ProcessOptions(GivenFields):
    """How many processes measure together."""

    def as_layout(self) -> str | None:
        """The options of a step that start as many processes; None where neither option is given."""
        given = self.options()
        if "gpus" in given:
            return f"--layout dp={given['gpus']}"
        return f"--layout dp={given['processes']} --device cpu" if given else None


@options
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
        from steplab.lab.machine import device_kind_here, fields_here

        fields = self.step.fields() | {"recipe": self.recipe}
        return resolve_with_recipe(fields_here(fields, **self.processes.options()), device_kind_here)

    def timeout_s(self) -> float | None:
        """The time after which the measurement is given up. Raises UserError for a text that is no time."""
        return parse_duration(self.timeout) if self.timeout else None


@options
class StudyOptions:
    """How the measurements of `sweep` and `study` are made."""

    resume: Annotated[
        bool,
        Parameter(help="Continue the newest study of the same measurements; make only those missing", negative=""),
    ] = False
    timeout: Annotated[str, Parameter(help="Time after which a measurement is given up: 90s, 5min, 2h")] = "1h"


@options
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


@options
class StoreOptions:
    """Where records are stored."""

    store: Annotated[
        Path | None,
        Parameter(help="Path of the store [default: $STEPLAB_STORE, else the XDG data folder]", group=_OUTPUT),
    ] = None
    debug: Annotated[
        bool, Parameter(help="Show the traceback of an error", negative="", group=_OUTPUT, show_default=False)
    ] = False


@options
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


@options
class OutputOptions(FileOptions):
    """Where records are stored, and how they are shown."""

    format: Annotated[Format | None, Parameter(help=_FORMAT_HELP, group=_OUTPUT)] = None


@options
class PageOptions(FileOptions):
    """Where records are stored, and how they are shown, which may be as a page."""

    format: Annotated[PageFormat | None, Parameter(help=_FORMAT_HELP, group=_OUTPUT)] = None
