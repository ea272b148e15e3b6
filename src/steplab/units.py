"""Formats and parses times, sizes, rates and shares.

Inside steplab, times are seconds, sizes bytes, rates per second; names carry the unit (`_s`, `_bytes`, `_flops`).
Memory is shown in binary units (GiB), bandwidth and messages in decimal ones (GB = 1e9), as by vendors and nccl-tests.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from math import inf
from typing import TypeVar

from steplab.errors import UserError

KIB, MIB, GIB = 1024, 1024**2, 1024**3
NS_PER_S = 1_000_000_000

_BINARY = (("EiB", 1024**6), ("PiB", 1024**5), ("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
_DECIMAL = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_SIZES = {name.lower(): scale for name, scale in _BINARY} | {
    f"{prefix.lower()}b": int(scale) for prefix, scale in _DECIMAL
}
_LARGEST_SIZE = 2**63
_SIZE = "a size; write it as 4096, 10kB, 1MB or 1MiB"
_TIME = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_ONE_DECIMAL_FROM = 0.001  # least share with one decimal of its percentage
_SMALLEST_SHARE = 1e-6  # share below which all digits are zeros
_COUNT_SUFFIXES = {"M": "1e6", "B": "1e9", "T": "1e12"}
_TIME_SUFFIXES = {"µs": "1e-6", "us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600", "d": "86400"}


def three_digits(value: float) -> str:
    """At least three significant digits and the whole integer part: 1234, 123, 12.3, 1.23, 0.120."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    for bound, decimals in ((100, 0), (10, 1), (1, 2)):
        if magnitude >= bound:
            return f"{value:.{decimals}f}"
    return f"{value:#.3g}"


def format_time(seconds: float) -> str:
    """A time in the unit that gives 1 to 1000, such as 12.3 ms."""
    for unit, scale in _TIME:
        if abs(seconds) >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_clock(seconds: float) -> str:
    """Elapsed time: 0:07, 12:30, 1:02:03."""
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def format_bytes(size_bytes: float) -> str:
    """Binary units, such as 1.50 GiB."""
    for unit, scale in _BINARY:
        if abs(size_bytes) >= scale:
            return f"{three_digits(size_bytes / scale)} {unit}" if scale > 1 else f"{size_bytes:.0f} B"
    return "0 B"


def format_rate(per_s: float, unit: str) -> str:
    """Decimal: format_rate(9.9e14, 'FLOP/s') -> '990 TFLOP/s'; with ' tokens/s' '12.3 k tokens/s'."""
    for prefix, scale in _DECIMAL:
        if abs(per_s) >= scale:
            return f"{three_digits(per_s / scale)} {prefix}{unit}"
    return f"{three_digits(per_s)} {unit.lstrip()}"


def format_count(count: float) -> str:
    """Decimal: 3.41 G, 950."""
    for prefix, scale in _DECIMAL:
        if abs(count) >= scale:
            return f"{three_digits(count / scale)} {prefix}"
    return f"{count:g}"


def format_message(size_bytes: float) -> str:
    """Size of a communication's message, in decimal units without trailing zeros: 1 MB, 2.5 kB, 640 B."""
    for prefix, scale in _DECIMAL:
        if abs(size_bytes) >= scale:
            digits = three_digits(size_bytes / scale)
            return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits} {prefix}B"
    return f"{size_bytes:g} B"


def format_percent(share: float) -> str:
    """0.4312 -> '43.1 %'."""
    return f"{100 * share:.1f} %"


def format_limit(share: float) -> str:
    """A percentage without trailing zeros, for thresholds that users choose: 0.02 -> '2 %', 0.025 -> '2.5 %'."""
    return f"{100 * share:g} %"


def format_change(share: float) -> str:
    """0.123 -> '+12.3 %'."""
    return f"{100 * share:+.1f} %"


def signed(value: float, write: Callable[[float], str]) -> str:
    """signed(-0.012, format_time) -> '-12.0 ms'; zero has no sign."""
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{write(abs(value))}"


def format_share(share: float) -> str:
    """Format a percentage that never rounds to zero: 0.4312 -> '43.1 %', 0.000154 -> '0.015 %', 0.0 -> '0.0 %', tiny ->
    '<0.0001 %'.
    """
    if 0 < share < _SMALLEST_SHARE:
        return f"<{100 * _SMALLEST_SHARE:.4f} %"
    return format_percent(share) if share == 0 or abs(share) >= _ONE_DECIMAL_FROM else f"{100 * share:.2g} %"


def parse_duration(text: str) -> float:
    """Seconds from '90', '90s', '5min' or '2h'. Raises UserError for other texts."""
    return _within(float(_number(text, _TIME_SUFFIXES)), inf, text, "a duration; write it as 90s, 5min or 2h")


def parse_share(text: str) -> float:
    """A share between 0 and 1 from '3%', '3 %' or '0.03'. Raises UserError for other texts."""
    return _within(float(_number(text, {"%": "0.01"})), 1, text, "a share between 0 and 1; write it as 3% or 0.03")


def parse_count(text: str) -> float:
    """Number of tokens from '300B', '15T' or '1.5e12' (B is 1e9, as in models' names). Raises UserError for other
    texts.
    """
    count = float(_number(text.upper(), _COUNT_SUFFIXES))
    return _within(count, inf, text, "a number of tokens; write it as 300B, 15T or 1.5e12")


def parse_bytes(text: str) -> int:
    """Bytes from '4096', '10kB', '1 MB' (decimal) or '1MiB' (binary). Raises UserError for other texts."""
    size_bytes = parse_size(text)
    if size_bytes != int(size_bytes):
        raise UserError(f"'{text}' is not {_SIZE}")
    return int(size_bytes)


def parse_size(text: str) -> Decimal:
    """As parse_bytes, but the bytes need not be a whole number: 12.3GiB."""
    return _within(_number(text.lower(), _SIZES), _LARGEST_SIZE, text, _SIZE)


_Number = TypeVar("_Number", float, Decimal)


def _within(number: _Number, below: float, text: str, what: str) -> _Number:
    if not 0 < number < below:
        raise UserError(f"'{text}' is not {what}")
    return number


def _number(text: str, suffixes: Mapping[str, int | str]) -> Decimal:
    """The number times the factor of its longest suffix; -1 if the text is no finite number.

    Decimal, because as a float 1.001 kB would not be a whole number of bytes.
    """
    number = text.strip()
    suffix = max(filter(number.endswith, suffixes), key=len, default="")
    try:
        found = Decimal(number.removesuffix(suffix)) * Decimal(suffixes.get(suffix, 1))
    except ArithmeticError:
        return Decimal(-1)
    return found if found.is_finite() else Decimal(-1)


def counted(number: int, noun: str) -> str:
    """1 cell, 2 cells."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted_results(number: int, noun: str, num_failed: int) -> str:
    """'28 cells, all measured', '28 cells, 2 failed'."""
    ended = "all measured" if number and not num_failed else "all failed" if num_failed == number else ""
    return f"{counted(number, noun)}, {ended or f'{num_failed} failed'}" if number else f"no {noun}s"


def format_figure(number: float) -> str:
    """Whole numbers below 10^6 in full, others with at most four digits: 16,384, 4.6e14, 319.4."""
    if float(number).is_integer() and abs(number) < 1e6:
        return f"{int(number):,}"
    if 1e-3 <= abs(number) < 1e6:
        return f"{number:,.4g}" if abs(number) < 1e4 else f"{number:,.0f}"
    mantissa, _, exponent = f"{number:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def figure_in_latex(number: float) -> str:
    r"""As format_figure, for LaTeX: 4.6 \cdot 10^{14}, 16{,}384."""
    mantissa, e, exponent = format_figure(number).partition("e")
    written = mantissa.replace(",", "{,}")
    return rf"{written} \cdot 10^{{{exponent}}}" if e else written
