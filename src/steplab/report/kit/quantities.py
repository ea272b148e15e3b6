from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steplab import units
from steplab.records.rows import Scalar
from steplab.report.kit.text import ABSENT


@dataclass(frozen=True, slots=True)
class Quantity:
    write: Callable[[Any], str]
    numeric: bool = True

    def show(self, value: Scalar) -> str:
        """Format a value. A string in a numeric column explains a missing value, and stays unchanged."""
        if value is None or value == "":
            return ABSENT
        return value if self.numeric and isinstance(value, str) else self.write(value)


BY_NAME = Quantity(str)
TEXT = Quantity(str, numeric=False)
LABEL = Quantity(str)
"""A number that is a name, such as a rank or a batch size; printed as Python does."""
NUMBER = Quantity(lambda value: f"{value:,}" if isinstance(value, int) else f"{value:,.6g}")
COUNT = Quantity(units.format_count)
TIME = Quantity(units.format_time)
BYTES = Quantity(units.format_bytes)
MESSAGE = Quantity(units.format_message)
SHARE = Quantity(units.format_share)
PERCENT = Quantity(units.format_percent)
"""A share of one, in per cent with one decimal."""
TIMES = Quantity(lambda value: f"{value:.2f}×" if value < 100 else f"{value:,.0f}×")
FLOPS = Quantity(lambda value: units.format_rate(value, "FLOP"))
FLOPS_PER_S = Quantity(lambda value: units.format_rate(value, "FLOP/s"))
BYTES_PER_S = Quantity(lambda value: units.format_rate(value, "B/s"))
GB_PER_S = Quantity(lambda value: units.three_digits(value / 1e9))
"""Bytes per second in units of 1e9, for headings that name GB/s."""
DIGITS = Quantity(units.three_digits)
JOULES = Quantity(lambda value: units.format_rate(value, "J"))
ERROR = Quantity(lambda value: f"{value:.1e}")
TOKENS_PER_S = Quantity(lambda value: units.format_rate(value, "").rstrip())
"""Example: '12.3 k', for headings that name tokens/s."""

_BY_UNIT = (
    ("flops_per_s", FLOPS_PER_S),
    ("bytes_per_s", BYTES_PER_S),
    ("tokens_per_s", TOKENS_PER_S),
    ("tokens_per_j", DIGITS),
    ("_j", JOULES),
    ("_per_s", NUMBER),
    ("_s", TIME),
    ("_bytes", BYTES),
    *((share, SHARE) for share in ("mfu", "hfu", "_share")),
)

UNITS = {
    "times": TIMES,
    "share": SHARE,
    "percent": PERCENT,
    "label": LABEL,
    "error": ERROR,
    "GB/s": GB_PER_S,
    "s": TIME,
    "bytes": BYTES,
    "B": BYTES,
    "%": Quantity(lambda value: units.format_percent(value / 100)),
    "tokens/s": Quantity(lambda value: units.format_rate(value, " tokens/s")),
}
"""Number format by unit name, as used in records.figure, records.comparison and records.finding."""


def in_unit(value: float, unit: str) -> str:
    return UNITS[unit].show(value) if unit in UNITS else units.format_rate(value, unit)


def quotient(over: Scalar, under: Scalar) -> float | None:
    """over / under; None if a value is absent or `under` is zero."""
    return over / under if isinstance(over, (int, float)) and isinstance(under, (int, float)) and under else None


def quantity_of(name: str) -> Quantity:
    """Number format of a field, by the unit at the end of its name; TEXT if it has none."""
    return next((quantity for unit, quantity in _BY_UNIT if name.endswith(unit)), TEXT)
