"""The accumulation study, against the same sums made in exact fractions and rounded by hand."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from steplab.measurement.precision.accumulation import NUM_ADDITIONS, NUMBER, accumulate
from steplab.records.numerics import Accumulation
from steplab.report.precision.sums import explanation, line, printed

BITS = {"float16": 11, "bfloat16": 8, "float32": 24}
"""Significant binary digits: IEEE 754 binary16 and binary32, and bfloat16."""

STUDY = accumulate(torch.device("cpu"))
BY_TYPES = {(a.accumulator, a.addend, a.cast): a for a in STUDY}


def rounded(exact: Fraction, dtype: str) -> Fraction:
    """The nearest number of a type, ties to even; far from its subnormals, where these sums are."""
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
    """Every partial sum, the first of them zero."""
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
    """From 8 on fp16's numbers are 2^-7 apart: 0.0100021 is 1.28 of them, and adds one."""
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
