import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from fractions import Fraction
from itertools import takewhile

from steplab.records.module_names import without_numbers
from steplab.records.numerics import Accumulation, Audit, Binade, Elements, MatmulAudit, ModuleAudit
from steplab.report.kit.grouping import grouped

_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"} | {
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}

SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
"""Binary digits by dtype, including the leading one."""
SMALLEST_EXPONENT = {"fp16": -24, "bf16": -133}
"""Binary exponent of the smallest subnormal number above zero."""
SMALLEST_NORMAL_EXPONENT = {"fp16": -14, "bf16": -126}
"""Binary exponent of the smallest normal number."""

THE_MODEL = "the model"
TYPES = ("parameters", "inputs", "outputs", "gradients", "output_gradients")
KINDS = ("outputs", "output gradients", "parameter gradients")


def name_of(group: Sequence[ModuleAudit | MatmulAudit]) -> str:
    """Module name without layer numbers, such as blocks.*.attention, or THE_MODEL."""
    return without_numbers(group[0].module) or THE_MODEL


def elements_of(module: ModuleAudit, kind: str) -> Elements | None:
    found = {
        "outputs": module.output_elements,
        "output gradients": module.output_gradient_elements,
        "parameter gradients": module.gradient_elements,
    }
    return found[kind]


def short(dtype: str) -> str:
    return _SHORT.get(dtype, dtype)


def shorts(dtypes: Iterable[str]) -> str:
    return ", ".join(map(short, dtypes)) or "–"


def module_groups(audit: Audit) -> list[list[ModuleAudit]]:
    found = grouped(audit.modules, lambda m: (without_numbers(m.module), m.kind, *(getattr(m, name) for name in TYPES)))
    return list(found.values())


def matmul_groups(audit: Audit) -> list[list[MatmulAudit]]:
    found = grouped(audit.matmuls, lambda m: (m.phase, without_numbers(m.module), m.op, m.node, m.inputs, m.outputs))
    return list(found.values())


def all_elements(audit: Audit, kind: str) -> Elements | None:
    """Sum up the model's elements of one of KINDS, each once: outputs and their gradients only of leaf modules."""
    counted = (module for module in audit.modules if module.leaf or kind == "parameter gradients")
    return added(elements_of(module, kind) for module in counted)


def added(parts: Iterable[Elements | None]) -> Elements | None:
    """Sum the counts; returns None without parts. A summed count is None if one part lacks it."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    sums: dict[str, int | None] = {}
    for field in fields(Elements):
        if field.name.startswith("num_"):
            values = [getattr(part, field.name) for part in given]
            sums[field.name] = None if None in values else sum(values)
    largest = [part.largest for part in given if part.largest is not None]
    smallest = [part.smallest for part in given if part.smallest is not None]
    return Elements(**sums, largest=max(largest, default=None), smallest=min(smallest, default=None))  # type: ignore[arg-type]


def num_lost(elements: Elements) -> int:
    """Number of overflowed, underflowed or subnormal elements; without an fp32 run, of infinite, NaN or subnormal."""
    overflowed = not_finite(elements) if elements.num_overflowed is None else elements.num_overflowed
    return overflowed + (elements.num_underflowed or 0) + elements.num_subnormal


def not_finite(elements: Elements) -> int:
    return elements.num_inf + elements.num_nan


_MOST_BINADES = 3


def printed(result: float) -> str:
    return f"{result:.4f}"


def title_of_sums(accumulations: Sequence[Accumulation]) -> str:
    return next((f"{a.number:g} added {a.num_additions} times" for a in accumulations), "Sums")


def line(accumulation: Accumulation) -> str:
    """Example: 'fp32 += fp16', or with a cast 'fp32 += fp16 cast to fp32'."""
    total, addend = short(accumulation.accumulator), short(accumulation.addend)
    return f"{total} += {addend}" + (f" cast to {total}" if accumulation.cast else "")


def explanation(accumulation: Accumulation) -> str:
    return " ".join(_sentences(accumulation))


def _sentences(a: Accumulation) -> Iterator[str]:
    if a.cast:
        yield "Same as the line above: += casts its addend implicitly, and here the cast is explicit."
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
    last_bit = Fraction(a.addend_value).denominator.bit_length() - 1
    first_bit = int(a.result).bit_length()
    return (
        f"No addition rounds: every sum is a multiple of 2^-{last_bit} below 2^{first_bit}, "
        f"{first_bit + last_bit} binary digits, and {short(a.accumulator)} has {SIGNIFICANT_BITS[a.accumulator]}. "
        "Only the addend is wrong."
    )
