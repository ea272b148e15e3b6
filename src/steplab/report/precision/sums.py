"""Explains the result of a sum of many small numbers by the arithmetic of its types."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import takewhile

from steplab.records.numerics import Accumulation, Binade
from steplab.report.precision.figures import SIGNIFICANT_BITS, short

_MOST_BINADES = 3


def printed(result: float) -> str:
    """A sum with four decimals, as torch prints it."""
    return f"{result:.4f}"


def title_of_sums(accumulations: Sequence[Accumulation]) -> str:
    """What was added up."""
    return next((f"{a.number:g} added {a.num_additions} times" for a in accumulations), "Sums")


def line(accumulation: Accumulation) -> str:
    """What was computed: 'fp32 += fp16', or with its cast 'fp32 += fp16 cast to fp32'."""
    total, addend = short(accumulation.accumulator), short(accumulation.addend)
    return f"{total} += {addend}" + (f" cast to {total}" if accumulation.cast else "")


def explanation(accumulation: Accumulation) -> str:
    """Where the result comes from, in a few sentences."""
    return " ".join(_sentences(accumulation))


def _sentences(a: Accumulation) -> Iterator[str]:
    if a.cast:
        yield "This is the line above with the cast written out, because the addition casts implicitly."
        return
    exact = float(Fraction(a.addend_value) * a.num_additions)
    addend, total = short(a.addend), short(a.accumulator)
    yield f"{a.number:g} is {a.addend_value:.9g} in {addend}, and {a.num_additions} of it are {exact:.9g}."
    if not a.num_rounded:
        yield _never_rounded(a)
        return
    yield f"{a.num_rounded} additions are rounded to the spacing of {total}, which grows with the sum:"
    stalled = [binade for binade in a.binades if binade.num_additions > 1 and binade.added == 0]
    moving = list(takewhile(lambda binade: binade not in stalled, a.binades))
    yield f"{'; '.join(_binade(binade) for binade in moving[-_MOST_BINADES:])}."
    if not stalled:
        yield f"Within one range all errors have the same sign, so they add up, to {a.result - exact:+.3g} in the end."
    for binade in stalled:
        yield (
            f"At {binade.start:g} it is {_power(binade.spacing)}, more than twice the addend: each of the last "
            f"{binade.num_additions} additions is rounded away, and the sum stays where it is."
        )


def _binade(binade: Binade) -> str:
    return (
        f"from {binade.start:g} to {2 * binade.start:g} it is {_power(binade.spacing)}, "
        f"and each adds {binade.added:.9g}"
    )


def _power(spacing: float) -> str:
    return f"2^{math.frexp(spacing)[1] - 1}"


def _never_rounded(a: Accumulation) -> str:
    """Why every partial sum is a number of the accumulator's type."""
    last_bit = Fraction(a.addend_value).denominator.bit_length() - 1
    first_bit = int(a.result).bit_length()
    return (
        f"No addition rounds: every sum is a multiple of 2^-{last_bit} below 2^{first_bit}, "
        f"{first_bit + last_bit} binary digits, and {short(a.accumulator)} has {SIGNIFICANT_BITS[a.accumulator]}. "
        "What is wrong is the addend alone."
    )
