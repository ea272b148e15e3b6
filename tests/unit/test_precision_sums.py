import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.sure import sure
from torch import Tensor

from steplab.measurement.precision.session import NUM_ADDITIONS, NUMBER, accumulate
from steplab.measurement.precision.watch import Exponents, Tally, kinds_of
from steplab.records.numerics import Accumulation, Elements
from steplab.report.precision.figures import explanation, line, printed

BITS = {"float16": 11, "bfloat16": 8, "float32": 24}
"""Significant bits: IEEE 754 binary16 and binary32, and bfloat16."""

STUDY = accumulate(torch.device("cpu"))
BY_TYPES = {(a.accumulator, a.addend, a.cast): a for a in STUDY}


def rounded(exact: Fraction, dtype: str) -> Fraction:
    """Nearest number of a type, ties to even, away from subnormals."""
    if not exact:
        return exact
    exponent = 0
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exact < Fraction(2) ** exponent:
        exponent -= 1
    spacing = Fraction(2) ** (exponent - BITS[dtype] + 1)
    return round(exact / spacing) * spacing  # Python rounds a Fraction's ties to even


def sums(accumulator: str, addend: str) -> list[Fraction]:
    value = rounded(Fraction(NUMBER), addend)
    made = [Fraction(0)]
    for _ in range(NUM_ADDITIONS):
        made.append(rounded(made[-1] + value, accumulator))
    return made


def test_rounding_by_hand_is_numpys() -> None:
    for numerator in range(1, 4000, 7):
        exact = Fraction(numerator, 997)
        assert rounded(exact, "float16") == Fraction(float(np.float16(numerator / 997)))
        assert rounded(exact, "float32") == Fraction(float(np.float32(numerator / 997)))


def test_the_four_sums_are_what_torch_prints() -> None:
    assert [printed(a.result) for a in STUDY[:4]] == ["10.0001", "9.9531", "10.0021", "10.0021"]
    assert [line(a) for a in STUDY[:4]] == ["fp32 += fp32", "fp16 += fp16", "fp32 += fp16", "fp32 += fp16 cast to fp32"]


@pytest.mark.parametrize("types", BY_TYPES, ids=str)
def test_a_sum_is_that_of_exact_arithmetic_rounded_at_each_step(types: tuple[str, str, bool]) -> None:
    accumulator, addend, _ = types
    a, expected = BY_TYPES[types], sums(accumulator, addend)
    value = rounded(Fraction(NUMBER), addend)
    assert Fraction(a.addend_value) == value
    assert Fraction(a.result) == expected[-1]
    assert a.num_rounded == sum(before + value != after for before, after in pairwise(expected))


@pytest.mark.parametrize("types", BY_TYPES, ids=str)
def test_the_binades_hold_every_addition_and_what_it_added(types: tuple[str, str, bool]) -> None:
    accumulator, addend, _ = types
    a, expected = BY_TYPES[types], sums(accumulator, addend)
    assert sum(binade.num_additions for binade in a.binades) == NUM_ADDITIONS
    for binade in a.binades[1:]:  # the first is the addition to zero
        inside = [after - before for before, after in pairwise(expected) if binade.start <= before < 2 * binade.start]
        assert len(inside) == binade.num_additions
        assert max(set(inside), key=inside.count) == Fraction(binade.added)
        assert Fraction(binade.spacing) == Fraction(binade.start) / 2 ** (BITS[accumulator] - 1)


def explained(accumulator: str, addend: str, cast: bool = False) -> str:
    return explanation(BY_TYPES[accumulator, addend, cast])


def test_fp16_is_explained_by_its_spacing() -> None:
    """From 8 on fp16's spacing is 2^-7: 0.0100021 is 1.28 of it, and adds one."""
    words = explained("float16", "float16")
    assert "0.01 is 0.0100021362 in fp16" in words
    assert "from 4 to 8 it is 2^-8, and each adds 0.01171875" in words
    assert "from 8 to 16 it is 2^-7, and each adds 0.0078125" in words
    assert "-0.049 in the end" in words


def test_an_fp32_sum_of_fp16_numbers_is_exact_and_says_why() -> None:
    words = explained("float32", "float16")
    assert "No addition rounds" in words
    assert "21 binary digits, and fp32 has 24" in words
    assert "and 1000 of it are 10.0021362" in words


def test_bf16_stalls_where_the_spacing_is_more_than_twice_the_addend() -> None:
    assert printed(BY_TYPES["bfloat16", "bfloat16", False].result) == "4.0000"
    words = explained("bfloat16", "bfloat16")
    assert "At 4 it is 2^-5, more than twice the addend" in words
    assert f"the last {sums('bfloat16', 'bfloat16').count(Fraction(4)) - 1} additions" in words


def test_a_sum_that_rounds_says_by_how_much_in_the_end() -> None:
    a: Accumulation = BY_TYPES["float32", "float32", False]
    error = a.result - a.addend_value * a.num_additions
    assert f"{error:+.3g} in the end" in explanation(a)
    assert a.num_rounded > 900


SMALLEST_NORMAL = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
INF, NAN = math.inf, math.nan

FP32_RUN = [0.0, 1.0, 2.0**-26, 2.0**-10, 2.0**-20, 70_000.0, INF, NAN, 1e-7, -3.0]
HERE = [0.0, 1.0, 0.0, 0.0, 2.0**-20, INF, INF, NAN, 0.0, NAN]


def count(here: Tensor, reference: Tensor | None = None, low: torch.dtype = torch.float16) -> Elements:
    tally = Tally()
    tally.add(here, kinds_of(reference, low) if reference is not None else None)
    return sure(tally.elements())


def test_known_elements_are_counted_for_what_they_are() -> None:
    found = count(torch.tensor(HERE, dtype=torch.float16), torch.tensor(FP32_RUN))
    assert found == Elements(
        num_elements=10,
        num_inf=2,
        num_nan=2,
        num_zero=4,
        num_subnormal=1,
        num_overflowed=2,  # 70,000 and -3; what was not finite in fp32 has not overflowed
        num_underflowed=3,  # 2^-26, 2^-10 and 1e-7; 0 was zero before
        num_below_range=1,  # 2^-26: half of fp16's smallest number, 2^-24, is 2^-25, and 1e-7 is more
        largest=1.0,
        smallest=2.0**-20,
    )


@pytest.mark.parametrize("dtype", list(SMALLEST_NORMAL), ids=str)
def test_counts_are_those_of_a_loop_over_the_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(3000, generator=generator) * 2.0 ** torch.randint(-140, 120, (3000,), generator=generator)
    exact[::50] = 0.0
    here = exact.to(dtype)
    found = count(here, exact, torch.bfloat16)
    values, wanted = here.double().tolist(), exact.double().tolist()
    lowest = torch.tensor(wanted, dtype=torch.float64).to(torch.bfloat16).double().tolist()
    assert found.num_inf == sum(map(math.isinf, values))
    assert found.num_zero == values.count(0.0)
    assert found.num_subnormal == sum(0 < abs(value) < SMALLEST_NORMAL[dtype] for value in values)
    pairs = list(zip(values, wanted, lowest, strict=True))
    assert found.num_underflowed == sum(value == 0 != was for value, was, _ in pairs)
    assert found.num_below_range == sum(value == 0 == low and was != 0 for value, was, low in pairs)
    assert found.num_overflowed == sum(math.isinf(value) and math.isfinite(was) for value, was, _ in pairs)
    assert found.largest == max(abs(value) for value in values if math.isfinite(value))
    assert found.smallest == min(abs(value) for value in values if value)
    if dtype == torch.float16:
        assert found.num_inf
        assert found.num_subnormal
        assert found.num_underflowed


def test_several_tensors_are_added_up() -> None:
    tally = Tally()
    for value in (4.0, 2.0**-20, 0.0):
        x = torch.full((3, 2), value, dtype=torch.float16)
        tally.add(x, kinds_of(torch.ones(3, 2), torch.float16))
    found = sure(tally.elements())
    assert (found.num_elements, found.num_zero, found.num_underflowed, found.num_subnormal) == (18, 6, 6, 6)
    assert (found.largest, found.smallest) == (4.0, 2.0**-20)


def test_without_an_fp32_run_losses_are_not_known() -> None:
    found = count(torch.tensor([0.0, INF]))
    assert (found.num_overflowed, found.num_underflowed, found.num_below_range) == (None, None, None)
    assert (found.num_inf, found.num_zero, found.largest, found.smallest) == (1, 1, 0.0, None)


def test_nothing_is_not_zero() -> None:
    tally = Tally()
    assert tally.elements() is None
    tally.add(torch.zeros(0), None)
    assert tally.elements() is None


def test_exponents_bracket_every_number() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2000, generator=generator) * 2.0 ** torch.randint(-130, 100, (2000,), generator=generator)
    x[:5] = torch.tensor([0.0, INF, NAN, 1.0, 2.0**-149])
    expected = Counter(math.frexp(value)[1] - 1 for value in x.tolist() if value and math.isfinite(value))
    exponents = Exponents()
    exponents.add(x[:700].view(7, 100))
    exponents.add(x[700:])
    assert dict(exponents.counts()) == expected
    assert [exponent for exponent, _ in exponents.counts()] == sorted(expected)
    assert expected[-149] == 1
