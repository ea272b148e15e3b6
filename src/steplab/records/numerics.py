"""The record of a precision audit: the data types that a step runs in, and the values that they lose.

An audit runs the step twice on the same weights and the same batch: in fp32, and in the requested precision. Losses are
counted element by element between the two, so that zeros from a ReLU do not count as underflow. Data types have torch's
names: float32, bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from steplab.records.problems import Problem, known
from steplab.records.record import StepRecord
from steplab.records.rows import Row, head, software, step_columns

Rule = Literal["low_precision", "fp32", "promote", "parts", "none", "cast", "off"]
"""What autocast does with an operation. low_precision: casts its inputs down. fp32: casts them up. promote: casts them
to the widest type among them. parts: treats the operations it is made of differently. none: runs it in the type of its
inputs. cast: the model itself requests the type. off: autocast is off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """Counts of the elements of some tensors, in the tensors' own type."""

    num_elements: int
    """Number of elements."""
    num_inf: int
    """Number of infinite elements."""
    num_nan: int
    """Number of NaN elements."""
    num_zero: int
    """Number of zeros, whether or not they are zero in fp32."""
    num_subnormal: int
    """Number of subnormal elements, which have fewer significant digits than normal numbers of their type."""
    num_overflowed: int | None
    """Number of elements that are infinite or NaN here and finite in the fp32 run; None: there was no fp32 run."""
    num_underflowed: int | None
    """Number of elements that are zero here and neither zero nor NaN in the fp32 run; None: there was no fp32 run."""
    num_below_range: int | None
    """Number of underflowed elements whose value in the fp32 run rounds to zero in the precision's type. The other
    underflowed elements were lost in their inputs, in a difference of numbers that round to the same value. None: there
    was no fp32 run."""
    largest: float | None
    """Largest finite magnitude; None: there is none."""
    smallest: float | None
    """Smallest magnitude above zero; None: there is none."""

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        for name in ("inf", "nan", "zero", "subnormal", "overflowed", "underflowed", "below_range"):
            count = getattr(self, f"num_{name}")
            if count is not None and count > self.num_elements:
                yield f".num_{name}", f"is {count} of {self.num_elements} elements"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleAudit:
    """Data types and losses of one module. A tuple of types has each type once, in the order of first appearance."""

    module: str
    """Dotted name of the module, such as blocks.0.attention; '' is the model."""
    kind: str
    """Class of the module, such as Linear."""
    leaf: bool
    """Whether the module has no submodules."""
    parameters: tuple[str, ...] = ()
    """Types of its own parameters, without those of submodules; empty: it has none."""
    inputs: tuple[str, ...] = ()
    """Types of its input tensors."""
    outputs: tuple[str, ...] = ()
    """Types of its output tensors."""
    gradients: tuple[str, ...] = ()
    """Types of its parameters' gradients."""
    output_gradients: tuple[str, ...] = ()
    """Types of the gradients that reached its outputs."""
    output_elements: Elements | None = None
    """Counts over its floating-point outputs in all calls; None: it has none."""
    gradient_elements: Elements | None = None
    """Counts over its parameters' gradients; None: there are none."""
    output_gradient_elements: Elements | None = None
    """Counts over the gradients that reached its outputs; None: there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationAudit:
    """Equal calls of one operation in the forward pass, as the model made them."""

    op: str
    """Torch's name of the operation, such as linear, layer_norm or cross_entropy."""
    rule: Rule
    """What autocast does with the operation on this device."""
    inputs: tuple[str, ...]
    """Floating-point types of its inputs, before autocast."""
    outputs: tuple[str, ...]
    """Types of its outputs."""
    calls: int
    """Number of calls."""
    parts: tuple[str, ...] = ()
    """Operations that it is made of and that the rule applies to; empty: the rule applies to the operation itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulAudit:
    """Equal calls of one operator that multiplies matrices, as the device executed them, after every cast."""

    module: str
    """Module of the call; in the backward pass, the module whose forward pass it differentiates; '' is the model."""
    phase: str
    """The pass: forward or backward."""
    op: str
    """Name of the operator, such as aten::mm."""
    node: str | None
    """Node of autograd's graph that made the call, such as MmBackward0; None in the forward pass."""
    inputs: tuple[str, ...]
    """Types of its input tensors, in order."""
    outputs: tuple[str, ...]
    """Types of its results."""
    calls: int
    """Number of calls."""

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        yield from known(".phase", self.phase, ("forward", "backward"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """Effect of a loss scale on the gradients. The counts cover all observed gradients: those of parameters, and those
    of the outputs of modules without submodules."""

    largest_gradient: float
    """Largest magnitude among the gradients of the fp32 run."""
    suggested_scale: float
    """Suggested loss scale: a power of two that brings the largest gradient to an eighth of the type's range, and with
    which the step had no overflow."""
    unscaled: Elements
    """Counts over the gradients of the step without a loss scale."""
    scaled: Elements
    """Counts over the gradients of the same step with the suggested scale, before they are divided by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The audit of one step in one precision."""

    loss_dtype: str | None
    """Type of the loss; None without a backward pass."""
    loss: float | None
    """Value of the loss; None without a backward pass, or if it is not finite."""
    reference_loss: float | None
    """Value of the loss in the fp32 run; None as for `loss`, or without an fp32 run."""
    modules: tuple[ModuleAudit, ...]
    """Audits of the modules, in the model's order."""
    operations: tuple[OperationAudit, ...]
    """Audits of the operations, in the order of their first call."""
    matmuls: tuple[MatmulAudit, ...]
    """Audits of the matrix products, in the order of their first call."""
    gradient_exponents: tuple[tuple[int, int], ...] = ()
    """Histogram of the gradients of the fp32 run: pairs (e, number of gradients with a magnitude from 2^e to below
    2^(e+1)), over the same gradients as in LossScaling."""
    loss_scaling: LossScaling | None = None
    """Effect of a loss scale; only for fp16 with a backward pass."""
    kept_on_cuda: tuple[str, ...] = ()
    """Operations of the step that autocast runs in fp32 on a CUDA GPU but not on this device."""

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        for index, (exponent, _) in enumerate(self.gradient_exponents):
            if abs(exponent) > 1100:
                yield f".gradient_exponents[{index}]", f"must be an exponent from -1100 to 1100, not {exponent}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Binade:
    """The additions that began with the sum between two powers of two, where its type has a constant spacing."""

    start: float
    """Lower bound of the sum, a power of two; 0 for the first addition."""
    spacing: float
    """Distance between neighbouring numbers of the accumulator's type there; 0 for the first addition."""
    num_additions: int
    """Number of additions."""
    added: float
    """Increase of the sum by each of these additions but the last, which may cross the upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """A sum of one number, added many times."""

    accumulator: str
    """Type of the sum."""
    addend: str
    """Type that the number was rounded to."""
    cast: bool
    """Whether it was cast to the sum's type before each addition."""
    number: float
    """The number as written."""
    addend_value: float
    """The number as rounded to the addend's type, exactly."""
    num_additions: int
    """Number of additions."""
    num_rounded: int
    """Number of additions whose exact sum the accumulator's type cannot represent, so that it was rounded."""
    result: float
    """The final sum, exactly."""
    binades: tuple[Binade, ...]
    """The additions by the binade of the sum, in order."""

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if not self.binades:
            yield ".binades", "is empty"
        if self.num_rounded > self.num_additions:
            yield ".num_rounded", f"is {self.num_rounded} of {self.num_additions} additions"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Numerics(StepRecord):
    """The record of `steplab precision`: the audit of one step in one precision, and sums on the device."""

    audit: Audit | None = None
    """The audit of the step; None without a step, or for a failure."""
    accumulations: tuple[Accumulation, ...] = ()
    """The sums of the accumulation study."""
    schema: str = "steplab.numerics/1"
    """Format of this record."""


def numerics_row(numerics: Numerics) -> Row:
    """The row of a precision audit, or of a study of sums alone."""
    row = head(numerics, "precision") | {"status": numerics.status} | step_columns(numerics.spec)
    return row | {
        "device": numerics.device_name,
        **software(numerics),
        "failure": numerics.failure.message if numerics.failure else None,
    }
