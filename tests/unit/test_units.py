from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab import units
from steplab.errors import UserError

FACTORS: dict[str, Decimal | int] = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60,
    "ns": Decimal("1e-9"), "µs": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": 1,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "": 1,
}  # fmt: skip


def half_of_the_third_digit(value: Decimal) -> Decimal:
    return min(Decimal(1), Decimal(1).scaleb(value.copy_abs().adjusted() - 2)) / 2


def assert_reads_as(text: str, value: float) -> None:
    """`text` is `value` to three digits or more. Scaling divides once, moving the quotient by at most one part in
    2**52.
    """
    number, _, unit = text.partition(" ")
    scale = Decimal(FACTORS[unit])
    exact = Decimal(value) / scale
    slack = abs(exact) / 2**52
    assert abs(Decimal(number) - exact) <= half_of_the_third_digit(exact) + slack, text


@pytest.mark.parametrize(
    ("value", "text"), [(1234, "1234"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (0, "0")]
)
def test_three_digits_keeps_the_integer_part_and_three_significant_digits(value: float, text: str) -> None:
    assert units.three_digits(value) == text
    if value:
        assert units.three_digits(-value) == f"-{text}"


@given(st.floats(1e-9, 1e15))
def test_three_digits_is_the_number_rounded(value: float) -> None:
    shown = Decimal(units.three_digits(value))
    assert abs(shown - Decimal(value)) <= half_of_the_third_digit(Decimal(value))


@given(st.floats(1e-9, 1e6))
def test_a_time_is_shown_in_the_unit_that_makes_it_read_from_1_to_1000(seconds: float) -> None:
    text = units.format_time(seconds)
    assert_reads_as(text, seconds)
    number = float(text.split()[0])
    assert number >= 1
    assert number <= 1000 or text.endswith(" s")


@given(st.integers(1, 2**70))
def test_bytes_are_shown_in_binary_units(size: int) -> None:
    text = units.format_bytes(size)
    assert_reads_as(text, size)
    assert 1 <= float(text.split()[0]) <= 1024 or text.endswith(" EiB")


@given(st.floats(1, 1e16))
def test_rates_are_shown_in_decimal_units(per_s: float) -> None:
    text = units.format_rate(per_s, "FLOP/s")
    assert text.endswith("FLOP/s")
    assert_reads_as(text.removesuffix("FLOP/s"), per_s)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_time(0), "0 s"),
        (units.format_time(0.0123), "12.3 ms"),
        (units.format_time(4.5e-6), "4.50 µs"),
        (units.format_time(2e-10), "0.2 ns"),
        (units.format_time(-0.0123), "-12.3 ms"),
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(3 * 2**29), "1.50 GiB"),
        (units.format_bytes(512), "512 B"),
        (units.format_bytes(3_220_006_174_480_015_360), "2.79 EiB"),
        (units.format_rate(9.9e14, "FLOP/s"), "990 TFLOP/s"),
        (units.format_rate(4.8e12, "B/s"), "4.80 TB/s"),
        (units.format_rate(12, "tokens/s"), "12.0 tokens/s"),
        (units.format_count(3_406_809_600), "3.41 G"),
        (units.format_count(950), "950"),
        (units.format_percent(0.4312), "43.1 %"),
        (units.format_clock(7.9), "0:07"),
        (units.format_clock(750), "12:30"),
        (units.format_clock(3723), "1:02:03"),
    ],
)
def test_documented_examples_read_as_documented(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5min", 300), ("2h", 7200), ("250ms", 0.25), (" 1.5 h ", 5400)]
)
def test_a_duration_is_read_in_its_unit(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "0", "-5s", "nan", "inf", "1e999h", "5 parsecs", "1h30", "ten"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError) as error:
        units.parse_duration(text)
    assert repr(text) in str(error.value)
    assert "90s" in str(error.value)


@given(st.integers(1, 9_999_999), st.sampled_from(["kB", "MB", "GB"]))
def test_a_size_of_whole_bytes_is_read_however_many_digits_it_has(thousandths: int, unit: str) -> None:
    scale = {"kB": 1, "MB": 1000, "GB": 1_000_000}[unit]
    assert units.parse_bytes(f"{thousandths // 1000}.{thousandths % 1000:03}{unit}") == thousandths * scale


@pytest.mark.parametrize("text", ["", "kB", "0", "-1MB", "nan", "inf GB", "1e400", "1.0005kB", "3 apples", "1_0 kilo"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"is not a size; write it as 4096, 10kB"):
        units.parse_bytes(text)
