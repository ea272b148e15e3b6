"""The record of a precision audit: data types in a step, and values lost to low precision.

An audit runs the step on the same weights and batch in fp32 and in the requested precision, and compares them element
by element, so zeros from a ReLU are no underflow. Data types have torch's names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from steplab.records.record import Problem, StepRecord, one_of

Rule = Literal["low_precision", "fp32", "promote", "parts", "none", "cast", "off"]
"""Autocast's rule. low_precision: casts inputs down. fp32: casts them up. promote: casts to the widest input type.
parts: inner operations differ. none: no cast. cast: the model requests the type. off: no autocast.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Numbers of special elements in tensors of one audit run, in their data type."""

    num_elements: int
    num_inf: int
    num_nan: int
    num_zero: int
    """Zeros, including elements that are zero in fp32 too."""
    num_subnormal: int
    """Subnormal elements, which have fewer significant digits."""
    num_overflowed: int | None
    """Infinite or NaN elements that are finite in fp32; None: no fp32 run."""
    num_underflowed: int | None
    """Zeros that are neither zero nor NaN in fp32; None: no fp32 run."""
    num_below_range: int | None
    """Underflowed elements with an fp32 value that rounds to zero in this type; others vanished earlier, as in a
    difference of rounded numbers. None: no fp32 run.
    """
    largest: float | None
    smallest: float | None

    def problems(self) -> Iterator[Problem]:
        for name in ("inf", "nan", "zero", "subnormal", "overflowed", "underflowed", "below_range"):
            count = getattr(self, f"num_{name}")
            if count is not None and count > self.num_elements:
                yield f".num_{name}", f"is {count} of {self.num_elements} elements"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleAudit:
    """Data types and losses in one module; each tuple lists distinct types by first appearance."""

    module: str
    """Dotted name, such as blocks.0.attention; '' for the whole model."""
    kind: str
    leaf: bool
    parameters: tuple[str, ...] = ()
    """Types of its own parameters, without submodules'."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    output_gradients: tuple[str, ...] = ()
    output_elements: Elements | None = None
    """Counts over all floating-point outputs of all calls; None: there are none."""
    gradient_elements: Elements | None = None
    output_gradient_elements: Elements | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationAudit:
    """Equal calls of one operation in the forward pass, before autocast splits or casts them."""

    op: str
    rule: Rule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int
    parts: tuple[str, ...] = ()
    """Inner operations that follow `rule`; empty: the operation itself does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Losses:
    """Numerical losses of a matrix product with fp8 operands; the largest over its calls."""

    error: float
    """Relative error (by norms) against the float64 product of the operands before casting, in the first 256 rows."""
    flushed: float
    """Share of an operand's elements that the cast turned from nonzero to zero."""
    saturated: float
    """Share of an operand's elements that the cast clamped at the format's largest number."""
    amaxes: tuple[tuple[float, float], ...] = ()
    """Largest magnitudes of both operands in each of the first training steps; empty: not recorded."""

    @property
    def largest_change(self) -> float | None:
        """Largest ratio between an operand's magnitudes in successive steps; None: fewer than two steps."""
        pairs = [pair for operand in zip(*self.amaxes, strict=True) for pair in pairwise(operand)]
        ratios = [max(pair) / min(pair) for pair in pairs if min(pair) > 0]
        return max(ratios, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulAudit:
    """Equal calls of one matrix product, as executed after all casts."""

    module: str
    """Module that calls it, or in backward the module whose gradient it computes; '' for the model."""
    phase: Annotated[str, one_of(("forward", "backward"))]
    op: str
    node: str | None
    """Autograd node that calls it, such as MmBackward0; None in forward."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int
    fp8: Fp8Losses | None = None
    """Losses if the operands are fp8; None: other types, or another library casts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """Effect of a loss scale on the gradients of parameters and of leaf modules' outputs."""

    largest_gradient: float
    suggested_scale: float
    """Power of two that scales the largest gradient to an eighth of the type's range, without overflow."""
    unscaled: Elements
    scaled: Elements
    """Counts over gradients under the suggested scale, not yet divided by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    loss_dtype: str | None
    loss: float | None
    reference_loss: float | None
    """Loss in fp32; None: not finite, or no fp32 run."""
    modules: tuple[ModuleAudit, ...]
    operations: tuple[OperationAudit, ...]
    matmuls: tuple[MatmulAudit, ...]
    gradient_exponents: tuple[tuple[Annotated[int, msgspec.Meta(ge=-1100, le=1100)], int], ...] = ()
    """Histogram of fp32 gradient magnitudes: pairs (e, number of magnitudes in [2^e, 2^(e+1)))."""
    loss_scaling: LossScaling | None = None
    kept_on_cuda: tuple[str, ...] = ()
    """Operations that autocast runs in fp32 on CUDA but not on this device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binade:
    """Additions during which the sum was in one interval [2^e, 2^(e+1)), where floats are equally spaced."""

    start: float
    """Lower bound of the interval; 0 for the first addition."""
    spacing: float
    """Spacing of floats in the interval; 0 for the first addition."""
    num_additions: int
    added: float
    """Increase per addition, except the last, which may leave the interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """Repeated addition of one number to a sum."""

    accumulator: str
    addend: str
    cast: bool
    """True if each addend is cast to the sum's type first."""
    number: float
    addend_value: float
    num_additions: int
    num_rounded: int
    """Additions whose exact sum the accumulator's type cannot represent."""
    result: float
    binades: Annotated[tuple[Binade, ...], msgspec.Meta(min_length=1)]

    def problems(self) -> Iterator[Problem]:
        if self.num_rounded > self.num_additions:
            yield ".num_rounded", f"is {self.num_rounded} of {self.num_additions} additions"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Numerics(StepRecord):
    """The record of `steplab precision`: a step's audit in one precision, and sums on the device."""

    audit: Audit | None = None
    accumulations: tuple[Accumulation, ...] = ()
    schema: str = "steplab.numerics/1"
