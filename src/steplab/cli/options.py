"""Options that several commands share.

Step options come from the declarations in `specs.step_choices`. Values stay text until `specs.resolve`, so study files,
Python and the command line share checks and messages.
"""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, dataclass_transform

from cyclopts import App, Group, Parameter

from steplab.errors import UserError
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
_SIZES = Group.create_ordered("Model size overrides")
_OUTPUT = Group.create_ordered("Record and output")
_GROUPS = {"step": STEP, "processes": SPREAD, "sizes": _SIZES, "variants": Group.create_ordered("Variants")}

Format = Literal["table", "json", "csv", "md", "latex"]
PageFormat = Literal["table", "json", "csv", "md", "latex", "html", "svg"]
QUIET = "Stop a cell after this long without progress: 90s, 5min, 2h"
_ONE_FILE = ("table", "json", "csv", "html", "svg")
_FORMAT_HELP = "Format [default: by --output's suffix, else table]"
_RECIPE = recipe_help().partition(":")[0]  # docs/advise.md lists what it sets
Recipe = Annotated[Literal["fast"] | None, Parameter(name="--recipe", help=_RECIPE, group=STEP)]


def timeout_help(what: str) -> str:
    return f"Stop {what} after this long: 90s, 5min, 2h"


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of groups of options: each subclass is a frozen dataclass whose fields are options of a command."""

    def __init_subclass__(cls) -> None:
        Parameter(name="*")(dataclass(frozen=True, kw_only=True)(cls))


def _help(field: StepField, with_default: bool) -> str:
    choices, default = [*(field.choices or field.about.meanings)], ""
    if with_default and field.default in choices:
        choices[choices.index(field.default)] += " (default)"
    elif with_default:
        default = field.help.removeprefix(field.meaning)
    return field.about.help + (f": {', '.join(choices)}" if choices else "") + default


def _attribute(field: StepField) -> str:
    return f"given_{field.attribute}"


def step_fields(without: Collection[str]) -> list[StepField]:
    return [field for field in FIELDS.values() if field.key not in without]


class GivenFields(Options):
    """Fields of a step or benchmark that were given as options; specs.resolve fills in the others. If options list
    several values, a benchmark has a cell for each combination.
    """

    declared: ClassVar[tuple[StepField, ...]]
    others: ClassVar[tuple[StepField, ...]]

    def __init_subclass__(
        cls,
        declared: Collection[StepField] = (),
        *,
        group: Group | None = None,
        with_defaults: bool = True,
        others: Collection[StepField] = (),
    ) -> None:
        """Add one option per field: text or a flag for `declared`, the field's type for `others`.

        Help lists declared fields under `group`, and the others, or all if it is None, under their own headings.
        """
        cls.declared, cls.others = tuple(declared), tuple(others)
        cls.__annotations__ = {}
        for field in (*declared, *others):
            own = {} if field in others and field.about.group == "step" else {"group": _GROUPS[field.about.group]}
            under: dict[str, Any] = {"group": group} if group and field not in others else own
            kind = Path if field.about.parse is Path else field.type
            kind = kind if kind is bool or (field in others and kind in (int, Path)) else str
            option = Parameter(
                name=option_name(field.key),
                help=_help(field, with_defaults),
                metavar="" if kind is str else None,
                negative=None,  # a flag of a field has --no- too
                **under,
            )
            cls.__annotations__[_attribute(field)] = Annotated[kind | None, option]
            setattr(cls, _attribute(field), None)
        super().__init_subclass__()

    def fields(self, without: Collection[str] = ()) -> dict[str, object]:
        """Given values by field name, except fields in `without`. Raises UserError if an option has several values."""
        given = {field: value for field, value in self._given(self.declared).items() if field.key not in without}
        for field, value in given.items():
            if "," in value and not field.about.parse:
                name = option_name(field.key)
                lists = "`steplab sweep` and `steplab plan steps` take lists"
                raise UserError(f"{name} takes a single value here, not '{value}'; {lists}")
        return {field.key: value for field, value in given.items()}

    def grid(self) -> "Grid":
        return {
            field.key: [value] if field.about.parse or not isinstance(value, str) else parts_of(value)
            for field, value in self._given(self.declared).items()
        }

    def options(self) -> dict[str, Any]:
        given = self._given(self.others)
        return {field.key: parts_of(value) if field.is_list else value for field, value in given.items()}

    def _given(self, among: Collection[StepField]) -> dict[StepField, Any]:
        values = {field: getattr(self, _attribute(field)) for field in among}
        return {field: value for field, value in values.items() if value is not None}


def parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


class StepOptions(GivenFields, declared=FIELDS.values()):
    """Options for the measured step. `sweep` takes lists: --context 128,256."""


def fields_in(text: str) -> dict[str, object]:
    """Step fields that a text of options sets, such as '--precision bf16 --compile block'.

    Raises UserError for unbalanced quotes, and cyclopts' errors for anything but options of a step with values.
    """
    side = App(name=f"'{text}'", help_flags=(), version_flags=(), result_action="return_value")

    @side.default
    def fields(*, step: StepOptions = StepOptions(), recipe: Recipe = None) -> dict[str, object]:
        return step.fields() | ({"recipe": recipe} if recipe else {})

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"'{text}' cannot be read as options: {error}") from None
    found: dict[str, object] = side(words, exit_on_error=False, print_error=False)
    return found


class ProcessOptions(GivenFields, others=declared_fields(Spread)):
    """Processes to start."""


class MeasurementOptions(Options):
    """Options of `run`, `profile` and `memory`."""

    step: StepOptions = StepOptions()
    recipe: Recipe = None
    processes: ProcessOptions = ProcessOptions()
    name: Annotated[str, Parameter(help="Name of the run in listings", show_default=False, group=_OUTPUT)] = ""
    timeout: Annotated[str | None, Parameter(help=f"{timeout_help('measuring')} [default: none]", group=_OUTPUT)] = None

    def spec(self) -> "StepSpec":
        from steplab.lab.machine import device_kind_here, fields_here

        fields = self.step.fields() | {"recipe": self.recipe}
        return resolve_with_recipe(fields_here(fields, **self.processes.options()), device_kind_here)

    def timeout_s(self) -> float | None:
        return parse_duration(self.timeout) if self.timeout else None


class StudyOptions(Options):
    resume: Annotated[bool, Parameter(help="Continue the newest study of the same measurements")] = False
    timeout: Annotated[str, Parameter(help=timeout_help("a measurement"))] = "1h"
    dry_run: Annotated[bool, Parameter(help="Only list the measurements; with --resume, the missing ones")] = False


class StoreOptions(Options):
    store: Annotated[
        Path | None, Parameter(help="Store [default: $STEPLAB_STORE, else the XDG data folder]", group=_OUTPUT)
    ] = None
    debug: Annotated[bool, Parameter(help="Show tracebacks", group=_OUTPUT, show_default=False)] = False


class FileOptions(StoreOptions):
    output: Annotated[Path | None, Parameter(help="Write to this file instead of stdout", group=_OUTPUT)] = None
    force: Annotated[
        bool,
        Parameter(
            help="Replace a file that steplab did not write; never the store",
            group=_OUTPUT,
            show_default=False,
        ),
    ] = False


class OutputOptions(FileOptions):
    format: Annotated[Format | None, Parameter(help=_FORMAT_HELP, group=_OUTPUT)] = None


class PageOptions(FileOptions):
    """Output options of commands that also write pages. If --output is a folder, a file `report` is written in it."""

    in_folder: ClassVar[bool] = False
    output: Annotated[
        Path | None, Parameter(help="Write to this file, or to report.md in this folder", group=_OUTPUT)
    ] = None
    format: Annotated[PageFormat | None, Parameter(help=_FORMAT_HELP, group=_OUTPUT)] = None

    def __post_init__(self) -> None:
        """Replace a folder by the file `report` in it, with the format's suffix, by default .md. A path that does not
        exist counts as a folder if it has no suffix, unless --format always writes a single file.
        """
        named = self.output
        if named and (named.is_dir() or not (named.suffix or named.exists() or self.format in _ONE_FILE)):
            suffix = {"latex": "tex", "table": "txt"}.get(self.format or "md", self.format or "md")
            object.__setattr__(self, "output", named / f"report.{suffix}")
            object.__setattr__(self, "in_folder", True)
