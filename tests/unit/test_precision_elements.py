"""Counting elements, against a loop over Python floats, and against a tensor whose elements are known one by one."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from steplab.measurement.precision.elements import Exponents, Tally, kinds_of
from steplab.records.numerics import Elements

SMALLEST_NORMAL = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}
INF, NAN = math.inf, math.nan

FP32_RUN = [0.0, 1.0, 2.0**-26, 2.0**-10, 2.0**-20, 70_000.0, INF, NAN, 1e-7, -3.0]
"""What the elements are in fp32. In fp16: 2^-26 is below its range; 70,000 beyond it."""
HERE = [0.0, 1.0, 0.0, 0.0, 2.0**-20, INF, INF, NAN, 0.0, NAN]
"""What became of them: underflow below the range, underflow within it, a subnormal, overflow, both undeserved no more,
and a number that is none any more."""


def count(here: Tensor, reference: Tensor | None = None, low: torch.dtype = torch.float16) -> Elements:
    tally = Tally()
    tally.add(here, kinds_of(reference, low) if reference is not None else None)
    found = tally.elements()
    assert found is not None
    return found


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
    found = tally.elements()
    assert found is not None
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
