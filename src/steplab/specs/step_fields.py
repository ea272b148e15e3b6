"""Declares a field of a step or of a benchmark's cell; option, help, checks and table column are derived from it.

A declaration makes the field, in `specs.step_choices`, `specs.model`, `specs.attention`, `specs.comm` or a benchmark's
options:

    batch: int = Declared(help="Sequences per step", said="batch {}", least=1).field(4)
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from steplab.errors import UserError, meant

Spec = Any
"""A specs.step.StepSpec; that module imports this one."""

LARGEST = 2**63 - 1
"""Largest valid count: of a tensor's size and a database column."""

Scalar = str | int | float | None
"""Value of a field in a table row."""
_DECLARED = "declared"
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """Metadata of a field; name, type, choices and default come from the dataclass."""

    help: str
    """Help of the option, without the choices and the default."""
    key: str | None = None
    """Name in study files and, with hyphens, of the option; None: the field's own name."""
    choices: tuple[str, ...] = ()
    """Valid values of a `str` field whose choices come from a table."""
    meanings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Meaning of each choice, for the help; with a `check`, of each valid form."""
    default_words: str | None = None
    """The default in words, for the help; None: the help shows its value, if any."""
    group: Literal["step", "processes", "sizes", "variants"] = "step"
    """Help section of the option. With `step`, a benchmark's option outside its cells gets no section of its own."""
    least: int | None = None
    """Smallest valid whole number."""
    above: float | None = None
    """Exclusive lower bound of a number."""
    check: Callable[[str], None] | None = None
    """Raises UserError for an invalid text."""
    parse: Callable[[str], object] | None = None
    """Converts text to a type other than text and numbers; the text may contain commas."""
    applies: Callable[[Spec], bool] = lambda spec: True
    """True if the field affects a step; otherwise rows and labels omit it."""
    unused: Callable[[Spec], str | None] | None = None
    """Why the field has no effect, with a fix; None if it has one. A grid omits the field from cells that it does not
    affect."""
    shown: Callable[[Spec], Scalar] | None = None
    """The value for rows and labels; None: the field's own."""
    column: str | None = None
    """Name in a row; None: the field's own name."""
    header: str | None = None
    """Heading of the column; None: the name, with spaces for underscores."""
    said: str = "{}"
    """Template for a value in labels and descriptions; {s} and {es} become plural endings."""
    words: Mapping[Scalar, str] = dataclasses.field(default_factory=dict)
    """Words that replace certain values."""
    unit: str = ""
    """Unit of a number, shown after it in tables."""
    quiet: bool = False
    """True to omit the default from descriptions, and from tables where all rows have it."""
    rank: int = 0
    """A narrow terminal drops columns of the highest ranks first, and never 0."""
    role: Literal["size", "what", "how", "device"] = "what"
    """size: can be a chart's x axis. what: the step's computation. how: its measurement, shown only if nothing else
    distinguishes cells. device: as how, but ignored in comparisons, which compare the hardware itself."""
    axis: int = 0
    """Position of a size among the candidates for the x axis."""
    panel: int = 99
    """Order in which fields split a crowded chart into panels."""
    order: tuple[str, ...] = ()
    """Known values of a text field in chart order; a field with choices uses their order."""
    baseline: Scalar = None
    """The value that a page's summary compares other values with; None: no comparison."""

    def field(self, default: object = dataclasses.MISSING) -> Any:
        """A dataclass's field with this declaration."""
        return dataclasses.field(default=default, metadata={_DECLARED: self})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepField:
    """One field that can be set or swept."""

    key: str
    """Name in study files and in Python; the option has hyphens instead of underscores."""
    attribute: str
    """Name of the dataclass attribute."""
    type: type
    """Type of the value: int, float, bool, str, another type, or a sequence of values."""
    annotation: Any
    """The type with its alternatives, such as None."""
    choices: tuple[str, ...]
    """Valid values; empty if the field is not a choice."""
    default: Any
    """Default value; MISSING for a model size, which depends on the model."""
    about: Declared
    """The field's declaration."""
    read: Callable[[Spec], Any]
    """Reads the value from a spec; None for a size if the model is not built in."""

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is not None

    @property
    def column(self) -> str:
        return self.about.column or self.key

    @property
    def header(self) -> str:
        return self.about.header or self.key.replace("_", " ")

    @property
    def help(self) -> str:
        default = self.about.default_words
        if default is None and self.default not in (None, dataclasses.MISSING):
            default = f"{self.default:g}" if self.type is float else str(self.default)
            default = ",".join(self.default) if self.is_list else default
        return self.meaning + (f" [default: {default}]" if default else "")

    @property
    def meaning(self) -> str:
        """Help without the default, for options that select records."""
        meanings = dict.fromkeys(self.choices, "") | dict(self.about.meanings)
        listed = ", ".join(f"{name} ({meaning})" if meaning else name for name, meaning in meanings.items())
        return self.about.help + (f": {listed}" if listed else "")

    def unused(self, spec: Spec) -> str | None:
        """Why the field has no effect on this step, with a fix; None if it has one."""
        return self.about.unused(spec) if self.about.unused else None

    def value(self, spec: Spec) -> Scalar:
        """The value in rows and labels; None if the field has no effect."""
        if not self.about.applies(spec) or self.unused(spec):
            return None
        value: Scalar = self.about.shown(spec) if self.about.shown else self.read(spec)
        return value

    def text(self, value: Scalar) -> str:
        number = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{number} {self.about.unit}".rstrip()

    def say(self, value: Scalar) -> str:
        """Value in words that name the field: 'context 1024', 'compiled (max-autotune)'."""
        if value in self.about.words:
            return self.about.words[value]
        one = value == 1
        return self.about.said.format(self.text(value), s="" if one else "s", es="" if one else "es")

    def parsed(self, given: object) -> object:
        """Convert text to the field's type; its own type passes. Raises UserError for an invalid value."""
        if self.type is bool:
            return _truth(self.key, given)
        if self.type is int:
            return _number(self.key, given, int, "a whole number")
        if self.type is float:
            return _number(self.key, given, float, "a number")
        if self.about.parse and isinstance(given, self.type):
            return given
        if not isinstance(given, str) or not given:
            instead = f"; choose one of {', '.join(self.choices)}" if self.choices else ""
            raise UserError(f"{self.key} must be a name, not {given!r}{instead}")
        return self.about.parse(given) if self.about.parse else given

    def refuse_invalid(self, value: Any) -> None:
        """Raise UserError, with the valid values, for an invalid one."""
        about = self.about
        if value is None:
            return
        if about.least is not None and not about.least <= value <= LARGEST:
            raise UserError(f"{self.key} must be at least {about.least} and below 2^63, not {value}")
        if about.above is not None and not about.above < value < LARGEST:
            raise UserError(f"{self.key} must be more than {about.above:g}, not {value}")
        if self.choices and value not in self.choices:
            raise UserError(f"{self.key} '{value}' is not known; choose one of {', '.join(self.choices)}")
        if about.check:
            about.check(value)


def declared_fields(cls: type, prefix: str = "", read: Callable[[Spec], Any] = lambda spec: spec) -> "Fields":
    """Fields of a dataclass. `prefix` starts their keys; `read` returns the instance in a spec. `pass_name` gets the
    key `pass`. Raises TypeError for an undeclared field."""
    found = []
    for field in dataclasses.fields(cls):
        about = field.metadata.get(_DECLARED)
        if about is None:
            raise TypeError(f"{cls.__name__}.{field.name} is not declared: write Declared(help=...).field(its default)")
        # Annotated gives limits of a decoded record.
        annotated: Any = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
        plain = get_args(annotated)[0] if get_origin(annotated) in (UnionType, Union) else annotated  # int | None
        choices = get_args(plain) if get_origin(plain) is Literal else about.choices
        found.append(
            StepField(
                key=prefix + (about.key or field.name.removesuffix("_name")),
                attribute=field.name,
                type=str if choices else plain,
                annotation=annotated,
                choices=choices,
                default=field.default,
                about=about,
                read=_reader(read, field.name),
            )
        )
    return tuple(found)


Fields = tuple[StepField, ...]


def check_declared(fields: Iterable[StepField], declaring: object) -> None:
    """Raise UserError, with the valid values, for an invalid field."""
    for field in fields:
        field.refuse_invalid(getattr(declaring, field.attribute))


def parse_declared(given: Mapping[str, object], known: Mapping[str, StepField], of: str = "") -> dict[str, Any]:
    """Values in their fields' types. Raises UserError for an unknown field (`of` completes the message) or an invalid
    value.
    """
    for name in given:
        if name not in known:
            raise UserError(f"unknown field '{name}'{of}; {meant(name, known)}")
    return {name: known[name].parsed(value) for name, value in given.items()}


def option_name(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _reader(read: Callable[[Spec], Any], name: str) -> Callable[[Spec], Any]:
    return lambda spec: getattr(read(spec), name, None)


def _truth(key: str, given: object) -> bool:
    known = given if isinstance(given, bool) else _TRUTH.get(str(given).strip().lower())
    if known is None:
        raise UserError(f"{key} must be true or false, not '{given}'")
    return known


def _number(key: str, given: object, kind: Callable[[Any], object], what: str) -> object:
    try:
        if isinstance(given, (str, int) if kind is int else (str, int, float)) and not isinstance(given, bool):
            return kind(given)
    except ValueError:
        pass  # the message below covers it
    raise UserError(f"{key} must be {what}, not '{given}'")
