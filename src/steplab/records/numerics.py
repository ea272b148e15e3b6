"""What a precision does to the numbers of one step: the data types it runs in, and what is lost in them.

An audit runs the step twice on the same weights and the same batch: in fp32, and in the precision asked for. What is
lost is counted element by element between the two, so that a ReLU's zeros are nobody's underflow. Data types are called
as torch calls them: float32, bfloat16.
"""

from dataclasses import dataclass
from typing import Literal

from steplab.records.record import StepRecord

NUMERICS_SCHEMA = "steplab.numerics/1"

Rule = Literal["low_precision", "fp32", "promote", "parts", "none", "cast", "off"]
"""What autocast does with an operation. low_precision: casts its inputs down. fp32: casts them up. promote: casts them
to the widest type among them. parts: treats the operations it is made of differently. none: lets it run in the type its
inputs have. cast: the model itself asks for the type. off: autocast is not on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elements:
    """The elements of some tensors, counted in the type they have."""

    num_elements: int
    """All of them."""
    num_inf: int
    """Infinite ones."""
    num_nan: int
    """Ones that are no number."""
    num_zero: int
    """Zeros, deserved or not."""
    num_subnormal: int
    """Neither zero nor as large as the smallest normal number of their type: each lacks some of its digits."""
    num_overflowed: int | None
    """Infinite or no number here, and finite in the fp32 run; None: there was no such run to compare with."""
    num_underflowed: int | None
    """Zero here, and neither zero nor NaN in the fp32 run; None: there was no such run."""
    num_below_range: int | None
    """Of these, those whose value in the fp32 run rounds to zero in the precision's type. The others were lost in what
    they are computed from: in a difference of numbers that the type does not tell apart. None as above."""
    largest: float | None
    """Largest finite magnitude; None: there is none."""
    smallest: float | None
    """Smallest magnitude above zero; None: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleAudit:
    """Types and losses at one module. A tuple of types has each type once, in the order of first appearance."""

    module: str
    """Dotted name: blocks.0.attention; '' is the model."""
    kind: str
    """Its class: Linear."""
    leaf: bool
    """Whether it has no modules inside."""
    parameters: tuple[str, ...] = ()
    """Types of its own parameters, not of those inside it; empty: it has none."""
    inputs: tuple[str, ...] = ()
    """Types of the tensors it was called with."""
    outputs: tuple[str, ...] = ()
    """Types of the tensors it gave."""
    gradients: tuple[str, ...] = ()
    """Types of its parameters' gradients."""
    output_gradients: tuple[str, ...] = ()
    """Types of the gradients that reached its outputs."""
    output_elements: Elements | None = None
    """Of its floating-point outputs, all calls taken together; None: it has none."""
    gradient_elements: Elements | None = None
    """Of its parameters' gradients; None: there are none."""
    output_gradient_elements: Elements | None = None
    """Of the gradients that reached its outputs; None: there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationAudit:
    """Calls alike of one operation of the forward pass, as the model made them."""

    op: str
    """As torch calls it: linear, layer_norm, cross_entropy."""
    rule: Rule
    """What autocast does with it on this device."""
    inputs: tuple[str, ...]
    """Floating-point types of its inputs, before autocast."""
    outputs: tuple[str, ...]
    """Of what it gave."""
    calls: int
    """How many."""
    parts: tuple[str, ...] = ()
    """Operations it is made of and to which the rule applies; empty: the rule is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulAudit:
    """Calls alike of one operator that multiplies matrices, as the device got them: after every cast."""

    module: str
    """Module it belongs to; in the backward pass, the one whose forward pass it differentiates; '' the model."""
    phase: str
    """forward or backward."""
    op: str
    """aten::mm."""
    node: str | None
    """Node of autograd that asked for it, MmBackward0; None in the forward pass."""
    inputs: tuple[str, ...]
    """Types of its tensors, in order."""
    outputs: tuple[str, ...]
    """Types of its results."""
    calls: int
    """How many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """What a factor on the loss saves of the gradients. `Elements` here are all gradients seen: of parameters, and of
    the outputs of the modules without modules inside."""

    largest_gradient: float
    """Largest magnitude among the gradients of the fp32 run."""
    suggested_scale: float
    """Power of two that leaves the largest gradient an eighth of the type's range, and with which the step had no
    overflow."""
    unscaled: Elements
    """Gradients of the step without a factor."""
    scaled: Elements
    """Gradients of the same step with it, before they are divided by it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """One step in one precision, looked at."""

    loss_dtype: str | None
    """Type of the loss; None without a backward pass."""
    loss: float | None
    """Its value; None without a backward pass, or where it is not finite."""
    reference_loss: float | None
    """Its value in the fp32 run; None as above, or without such a run."""
    modules: tuple[ModuleAudit, ...]
    """In the order in which the model names them."""
    operations: tuple[OperationAudit, ...]
    """In the order of their first call."""
    matmuls: tuple[MatmulAudit, ...]
    """In the order of their first call."""
    gradient_exponents: tuple[tuple[int, int], ...] = ()
    """(e, count): gradients of the fp32 run with a magnitude from 2^e to below 2^(e+1), those as in LossScaling."""
    loss_scaling: LossScaling | None = None
    """For fp16 with a backward pass."""
    kept_on_cuda: tuple[str, ...] = ()
    """Operations seen that autocast would run in fp32 on a CUDA GPU and does not on this device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Binade:
    """The additions that began with the sum between two powers of two: there its spacing is one number."""

    start: float
    """Lower bound of the sum, a power of two; 0 for the first addition."""
    spacing: float
    """Distance between neighbouring numbers of the accumulator's type there; 0 for the first addition."""
    num_additions: int
    """How many."""
    added: float
    """What most of them added to the sum: all but the last, which may reach beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """One number added to a sum again and again."""

    accumulator: str
    """Type of the sum."""
    addend: str
    """Type the number was rounded to."""
    cast: bool
    """Whether it was cast to the sum's type before each addition."""
    number: float
    """The number as written."""
    addend_value: float
    """The number as rounded to the addend's type, exactly."""
    num_additions: int
    """How many."""
    num_rounded: int
    """How many of them had a sum that the accumulator's type does not hold, and were rounded."""
    result: float
    """The sum at the end, exactly."""
    binades: tuple[Binade, ...]
    """Where the sum was, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics(StepRecord):
    """What `steplab precision` saw of one step in one precision, and of sums on that device."""

    audit: Audit | None = None
    """What was seen of the step; None without one, or for a failure."""
    accumulations: tuple[Accumulation, ...] = ()
    """The accumulation study."""
    schema: str = NUMERICS_SCHEMA
    """Format of this record."""
