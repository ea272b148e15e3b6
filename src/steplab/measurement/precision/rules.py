"""The rule of autocast for an operation on a kind of device.

torch's dispatcher tells whether there is a rule, for the torch in use: the lists of CPU and CUDA differ (a CPU's has
neither norms nor softmax). It does not tell which rule; torch documents that ("Autocast Op Reference" of torch.amp),
and the two shorter of its three lists are below.
"""

from collections.abc import Iterable
from typing import Any

from steplab.measurement.compat import autocast_has_rule, is_made_of_parts, is_operator
from steplab.records.numerics import Rule

_LOW_PRECISION = """
_addmm_activation _convolution _native_multi_head_attention _scaled_dot_product_flash_attention _thnn_fused_gru_cell
_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d conv_transpose3d convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul
mkldnn_rnn_layer mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
"""
_PROMOTE = """
addcdiv addcmul atan2 bilinear cat cross dot index_copy index_put scatter_add stack tensordot vdot
"""
_PROMOTE_ON_CUDA = "grid_sampler"  # a CPU's list has it among those in fp32
_MOVES = """
broadcast_to chunk clone contiguous detach diagonal expand expand_as flatten flip getitem movedim narrow new_empty
new_full new_ones new_zeros ones_like permute repeat requires_grad_ reshape reshape_as roll select slice split squeeze
swapaxes t tile to_dense transpose tril triu unbind unflatten unsqueeze view view_as zeros_like
"""
LOW_PRECISION, PROMOTE = frozenset(_LOW_PRECISION.split()), frozenset(_PROMOTE.split())
"""The operators that autocast runs in low precision, and those whose inputs it promotes to one type."""
MOVES = frozenset(_MOVES.split())
"""Operations that move elements and compute nothing; they keep the type."""

_OPERATOR_OF = {"cross_entropy": "cross_entropy_loss", "truediv": "div"}
"""The operator behind a function of torch with another name."""

CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double"})
"""Operations by which a model itself changes a type."""


def op_name(function: Any) -> str:
    """The name of a function of torch, without the underscores of operators: `a @ b` is matmul."""
    name = str(getattr(function, "__name__", function))
    bare = name.strip("_") if name.startswith("__") else name
    return bare[1:] if name.startswith("__r") and is_operator(bare[1:]) else bare


def rule_of(op: str, device_type: str, ran: Iterable[str]) -> tuple[Rule, tuple[str, ...]]:
    """The rule of autocast for `op`, named as op_name does, and the parts through which it applies.

    An operation without a rule may consist of operators that have one: cross_entropy of log_softmax and nll_loss. `ran`
    are the operators below autocast that ran for it.
    """
    if op in CASTS:
        return "cast", ()
    operator = _OPERATOR_OF.get(op, op)
    if autocast_has_rule(operator, device_type):
        return _which(operator, device_type), ()
    if is_operator(operator) and not is_made_of_parts(operator):
        return "none", ()
    above = dict.fromkeys(part.removeprefix("_").removesuffix("_forward") for part in ran)
    parts = tuple(part for part in above if autocast_has_rule(part, device_type))
    rules = {_which(part, device_type) for part in parts}
    return ("none" if not rules else rules.pop() if len(rules) == 1 else "parts"), parts


def _which(operator: str, device_type: str) -> Rule:
    if operator in LOW_PRECISION:
        return "low_precision"
    promotes = operator in PROMOTE or (device_type == "cuda" and operator == _PROMOTE_ON_CUDA)
    return "promote" if promotes else "fp32"
