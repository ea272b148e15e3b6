"""The record of a precision audit: data types of a step, and the values they lose.

An audit runs the step on the same weights and batch in fp32 and in the requested precision. Losses are counted element
by element between the two, so zeros from a ReLU are no underflow. Data types have torch's names: float32, bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from steplab.records.record import Problem, StepRecord, known

Rule = Literal["low_precision", "fp32", "promote", "parts", "none", "cast", "off"]
"""Autocast's treatment of an operation. low_precision: casts inputs down. fp32: casts them up. promote: casts to their
widest type. parts: differs by inner operation. none: keeps the inputs' type. cast: the model requests the type. off: no
autocast.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Counts of tensor elements, in the tensors' own type."""

    num_elements: int
    num_inf: int
    num_nan: int
    num_zero: int
    """Zeros, also those that are zero in fp32."""
    num_subnormal: int
    """Subnormal elements, which have fewer significant digits."""
    num_overflowed: int | None
    """Infinite or NaN here, finite in fp32; None: no fp32 run."""
    num_underflowed: int | None
    """Zero here, neither zero nor NaN in fp32; None: no fp32 run."""
    num_below_range: int | None
    """Underflowed elements with an fp32 value that rounds to zero in this type. Others were lost in their inputs, as
    differences of numbers that round to the same value. None: no fp32 run.
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
    """Data types and losses of one module. Tuples hold each type once, by first appearance."""

    module: str
    """Dotted name, such as blocks.0.attention; '' is the model."""
    kind: str
    leaf: bool
    parameters: tuple[str, ...] = ()
    """Types of its parameters, without submodules'."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    output_gradients: tuple[str, ...] = ()
    output_elements: Elements | None = None
    """Counts over floating-point outputs of all calls; None: without them."""
    gradient_elements: Elements | None = None
    output_gradient_elements: Elements | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationAudit:
    """Equal calls of an operation in the forward pass, as the model made them."""

    op: str
    rule: Rule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int
    parts: tuple[str, ...] = ()
    """Inner operations under the rule; empty: the rule applies to the operation itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Losses:
    """Losses of products of operands in fp8, the largest of their calls."""

    error: float
    """Norm of the difference from the float64 product of the operands before their casts, over that product's norm; of
    the result's first 256 rows."""
    flushed: float
    """Share of an operand's elements that were not zero and became zero."""
    saturated: float
    """Share of an operand's elements that were clamped at the format's largest number."""
    amaxes: tuple[tuple[float, float], ...] = ()
    """Largest magnitudes of both operands in each of the first training steps; empty: not recorded."""

    @property
    def largest_change(self) -> float | None:
        """Largest ratio of an operand's magnitudes in two successive steps; None: fewer than two steps."""
        pairs = [pair for operand in zip(*self.amaxes, strict=True) for pair in pairwise(operand)]
        ratios = [max(pair) / min(pair) for pair in pairs if min(pair) > 0]
        return max(ratios, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulAudit:
    """Equal calls of a matrix product, as executed after every cast."""

    module: str
    """Calling module, in backward the module being differentiated; '' is the model."""
    phase: str
    op: str
    node: str | None
    """Calling node of autograd's graph, such as MmBackward0; None in the forward pass."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int
    fp8: Fp8Losses | None = None
    """Losses of a product of operands in fp8; None: other types, or another library's casts."""

    def problems(self) -> Iterator[Problem]:
        yield from known(".phase", self.phase, ("forward", "backward"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """Effect of a loss scale on gradients of parameters and of leaf modules' outputs."""

    largest_gradient: float
    suggested_scale: float
    """Power of two that brings the largest gradient to an eighth of the type's range, without overflow in the step."""
    unscaled: Elements
    scaled: Elements
    """Counts over gradients with the suggested scale, before dividing by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    loss_dtype: str | None
    loss: float | None
    reference_loss: float | None
    """The loss in fp32; None as for `loss`, or without an fp32 run."""
    modules: tuple[ModuleAudit, ...]
    operations: tuple[OperationAudit, ...]
    matmuls: tuple[MatmulAudit, ...]
    gradient_exponents: tuple[tuple[int, int], ...] = ()
    """Histogram of fp32 gradients as in LossScaling: pairs (e, count with magnitude in [2^e, 2^(e+1)))."""
    loss_scaling: LossScaling | None = None
    kept_on_cuda: tuple[str, ...] = ()
    """Operations that autocast runs in fp32 on CUDA but not on this device."""

    def problems(self) -> Iterator[Problem]:
        for index, (exponent, _) in enumerate(self.gradient_exponents):
            if abs(exponent) > 1100:
                yield f".gradient_exponents[{index}]", f"must be an exponent from -1100 to 1100, not {exponent}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Binade:
    """Additions while the sum lay between two powers of two, where its type has constant spacing."""

    start: float
    """Lower bound of the sum, a power of two; 0 for the first addition."""
    spacing: float
    """Spacing of the accumulator's type there; 0 for the first addition."""
    num_additions: int
    added: float
    """Increase per addition, except the last, which may cross the upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """One number, added many times."""

    accumulator: str
    addend: str
    cast: bool
    """True if cast to the sum's type before each addition."""
    number: float
    addend_value: float
    num_additions: int
    num_rounded: int
    """Additions with an exact sum that the accumulator's type had to round."""
    result: float
    binades: tuple[Binade, ...]

    def problems(self) -> Iterator[Problem]:
        if not self.binades:
            yield ".binades", "is empty"
        if self.num_rounded > self.num_additions:
            yield ".num_rounded", f"is {self.num_rounded} of {self.num_additions} additions"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Numerics(StepRecord):
    """The record of `steplab precision`: a step's audit in one precision, and sums on the device."""

    audit: Audit | None = None
    accumulations: tuple[Accumulation, ...] = ()
    schema: str = "steplab.numerics/1"
