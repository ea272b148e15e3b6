from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steplab import units
from steplab.records.rows import Scalar
from steplab.report.kit.text import ABSENT


@dataclass(frozen=True, slots=True)
class Quantity:
    write: Callable[[Any], str]
    """Writes a number, or a text for words."""
    numeric: bool = True
    """True for figures, aligned to the right."""

    def show(self, value: Scalar) -> str:
        """A text among figures is unchanged: it is the reason of a missing figure."""
        if value is None or value == "":
            return ABSENT
        return value if self.numeric and isinstance(value, str) else self.write(value)


def _decimal(value: float) -> str:
    """1,234,567; fractions have six significant digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


BY_NAME = Quantity(str)
"""The quantity of the unit at the end of a field's name."""
TEXT = Quantity(str, numeric=False)
"""Words; numbers as in Python."""
LABEL = Quantity(str)
"""A number as a name (rank, batch size), as in Python."""
NUMBER = Quantity(_decimal)
"""A count or an exact number of bytes, with all its digits: 1,234,567."""
COUNT = Quantity(units.format_count)
"""A large count: 3.41 G."""
TIME = Quantity(units.format_time)
"""Seconds: 12.3 ms."""
BYTES = Quantity(units.format_bytes)
"""Bytes in memory, in binary units: 1.50 GiB."""
MESSAGE = Quantity(units.format_message)
"""Bytes of a message, in decimal units: 1 MB."""
SHARE = Quantity(units.format_share)
"""A share of one: 43.1 %; small ones keep their digits."""
PERCENT = Quantity(units.format_percent)
"""A share of one with one decimal, however small."""
TIMES = Quantity(lambda value: f"{value:.2f}×")
"""A ratio: 1.23×."""
FLOPS = Quantity(lambda value: units.format_rate(value, "FLOP"))
"""Floating-point operations: 3.41 TFLOP."""
FLOPS_PER_S = Quantity(lambda value: units.format_rate(value, "FLOP/s"))
"""Floating-point operations per second: 990 TFLOP/s."""
BYTES_PER_S = Quantity(lambda value: units.format_rate(value, "B/s"))
"""Bytes per second, in decimal units: 4.80 TB/s."""
GB_PER_S = Quantity(lambda value: units.three_digits(value / 1e9))
"""Bytes per second in GB/s, where the heading names the unit; GB is 1e9 bytes."""
DIGITS = Quantity(units.three_digits)
"""A number with three significant digits."""
JOULES = Quantity(lambda value: units.format_rate(value, "J"))
"""Energy: 142 J."""
ERROR = Quantity(lambda value: f"{value:.1e}")
"""A relative error: 1.2e-03."""
TOKENS_PER_S = Quantity(lambda value: units.format_rate(value, "").rstrip())
"""Tokens per second, where the heading names the unit: 12.3 k."""

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

UNITS = {"times": TIMES, "share": SHARE, "percent": PERCENT, "label": LABEL, "error": ERROR, "GB/s": GB_PER_S}
"""Quantities of figures without a unit in the key (records.figure)."""


def quotient(over: Scalar, under: Scalar) -> float | None:
    """None if one is absent, or the second zero."""
    return over / under if isinstance(over, (int, float)) and isinstance(under, (int, float)) and under else None


def quantity_of(name: str) -> Quantity:
    """By the unit at the end of a field's name; words without one."""
    return next((quantity for unit, quantity in _BY_UNIT if name.endswith(unit)), TEXT)
