"""Records every operation of a step, above and below autocast.

A mode over torch's functions sees calls such as layer_norm; one over the dispatcher sees the operators that run, casts
and products such as mm. A backward node's number gives the module whose forward pass made it.

torch shows that autocast has a rule for an operation, but not the rule; two of its three lists ("Autocast Op Reference"
of torch.amp) are below.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.measurement import compat
from steplab.measurement.step.spans import Place
from steplab.measurement.tensors import dtype_name, tensors_in
from steplab.records.numerics import Fp8Losses, MatmulAudit, OperationAudit, Rule

_LOW_PRECISION = """
_addmm_activation _convolution _native_multi_head_attention _scaled_dot_product_flash_attention _thnn_fused_gru_cell
_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
conv_transpose2d conv_transpose3d convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul
mkldnn_rnn_layer mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
"""
_PROMOTE = """
addcdiv addcmul atan2 bilinear cat cross dot index_copy index_put scatter_add stack tensordot vdot
"""
_PROMOTE_ON_CUDA = "grid_sampler"  # in fp32 on a CPU
_VIEWS = """
broadcast_to chunk detach diagonal expand expand_as flatten getitem movedim narrow permute requires_grad_ reshape
reshape_as select slice split squeeze swapaxes t transpose unbind unflatten unsqueeze view view_as
"""
_COPIES = """
clone contiguous flip new_empty new_full new_ones new_zeros ones_like repeat roll tile to_dense tril triu zeros_like
"""
LOW_PRECISION, PROMOTE = frozenset(_LOW_PRECISION.split()), frozenset(_PROMOTE.split())
"""Operators that autocast runs in low precision, and those whose inputs it promotes to one type."""
MOVES = frozenset((_VIEWS + _COPIES).split())
"""Operations that move data without computing or changing its type."""

_OPERATOR_OF = {"cross_entropy": "cross_entropy_loss", "truediv": "div"}

CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16", "double"})
"""Casts that the model itself calls."""


def op_name(function: Any) -> str:
    """Name without an operator's underscores: `a @ b` is matmul."""
    name = str(getattr(function, "__name__", function))
    bare = name.strip("_") if name.startswith("__") else name
    return bare[1:] if name.startswith("__r") and compat.is_operator(bare[1:]) else bare


def rule_of(op: str, device_type: str, ran: Iterable[str]) -> tuple[Rule, tuple[str, ...]]:
    """Autocast's rule for `op`, and the parts through which it applies: cross_entropy has none, but log_softmax and
    nll_loss do. `ran` are the operators that ran for it.
    """
    if op in CASTS:
        return "cast", ()
    operator = _OPERATOR_OF.get(op, op)
    if compat.autocast_has_rule(operator, device_type):
        return _which(operator, device_type), ()
    if compat.is_operator(operator) and not compat.is_made_of_parts(operator):
        return "none", ()
    above = dict.fromkeys(part.removeprefix("_").removesuffix("_forward") for part in ran)
    parts = tuple(part for part in above if compat.autocast_has_rule(part, device_type))
    rules = {_which(part, device_type) for part in parts}
    return ("none" if not rules else rules.pop() if len(rules) == 1 else "parts"), parts


def _which(operator: str, device_type: str) -> Rule:
    if operator in LOW_PRECISION:
        return "low_precision"
    promotes = operator in PROMOTE or (device_type == "cuda" and operator == _PROMOTE_ON_CUDA)
    return "promote" if promotes else "fp32"


_MATMULS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "_addmm_activation", "linear", "_scaled_mm"}
)
_MATMUL_WORDS = ("convolution", "attention")
_ATTRIBUTES = ("get", "set")  # the name of reading and writing an attribute of a tensor

Types = tuple[str, ...]
_Call = tuple[str, str, str, str | None, Types, Types]
Products = list[tuple[_Call, Tensor]]
"""Products in fp8, in order: relative error, flushed and saturated shares, and both operands' largest magnitudes."""
_CHECKED_ROWS = 256


class AuditPlace(Place):
    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.is_counting = False

    def audited_module(self) -> str:
        """Name of the current module, also in a backward node; '' outside any."""
        if self.phase == "forward":
            return self.module
        node = compat.running_node()
        return "" if node is None else self.module_of(compat.sequence_number(node))

    @contextmanager
    def counting(self, device_type: str) -> Iterator[None]:
        self.is_counting = True
        try:
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                yield
        finally:
            self.is_counting = False


class Operators(TorchDispatchMode):
    def __init__(self, place: AuditPlace, checked_rows: int = _CHECKED_ROWS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._place, self._checked_rows = place, checked_rows
        self._calls: dict[_Call, int] = {}
        self.fp8_products: Products = []
        self._casts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """By address: a tensor in fp8, its source, and its flushed and saturated shares and largest magnitude."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._place.is_counting:
            op: str = func.name().partition(".")[0]
            name = op.rpartition("::")[2]
            self.names.append(name)
            if name == "fp8_cast_both":
                with self._place.counting(result[0].device.type):
                    self._note_cast(*args[:2], *result[:2])
            if name in _MATMULS or any(word in name for word in _MATMUL_WORDS):
                self._note(op, args, result)
        return result

    def _note(self, op: str, args: Any, result: Any) -> None:
        phase = self._place.phase
        node = compat.running_node() if phase == "backward" else None
        node_name = str(node.name()).rpartition("::")[2] if node is not None else None
        operands = args[:2] if op == "aten::_scaled_mm" else args  # without scales
        inputs = tuple(dtype_name(tensor.dtype) for tensor in tensors_in(operands) if tensor.is_floating_point())
        key = (self._place.audited_module(), phase, op, node_name, inputs, floats_in(result))
        self._calls[key] = self._calls.get(key, 0) + 1
        if op == "aten::_scaled_mm":
            with self._place.counting(result.device.type):
                self._note_fp8(key, args[0], args[1], result)

    def _note_cast(self, x: Tensor, amax: Tensor, rows: Tensor, columns: Tensor) -> None:
        lost = (x != 0) & (rows.float() == 0)
        losses = torch.stack([lost.float().mean(), (x.abs().float() > amax).float().mean(), amax.view(())])
        for values, source in ((rows, x), (columns, x.t())):
            self._casts[values.data_ptr()] = (values, source, losses)

    def _note_fp8(self, key: _Call, a: Tensor, b: Tensor, result: Tensor) -> None:
        if not (a.data_ptr() in self._casts and b.data_ptr() in self._casts):
            return
        (_, a_MS, of_a), (_, b_NS, of_b) = self._casts[a.data_ptr()], self._casts[b.data_ptr()]
        exact = a_MS[: self._checked_rows].double() @ b_NS.double().t()
        error = (result[: self._checked_rows].double() - exact).norm() / exact.norm()
        shares, amaxes = torch.maximum(of_a, of_b)[:2], torch.stack([of_a[2], of_b[2]])
        self.fp8_products.append((key, torch.cat([error.float()[None], shares, amaxes])))

    def _losses(self, key: _Call, steps: Sequence[Products]) -> Fp8Losses | None:
        numbers = [number for number, (each, _) in enumerate(self.fp8_products) if each == key]
        if not numbers:
            return None
        own, *histories = (
            torch.stack([of_step[number][1] for number in numbers]).amax(0).tolist()
            for of_step in (self.fp8_products, *steps)
        )
        return Fp8Losses(error=own[0], flushed=own[1], saturated=own[2], amaxes=tuple((*of[3:],) for of in histories))

    def matmuls(self, steps: Sequence[Products] = ()) -> tuple[MatmulAudit, ...]:
        """Audit per matmul; `steps`: fp8 products of training steps, for histories of largest magnitudes."""
        names = ("module", "phase", "op", "node", "inputs", "outputs")
        return tuple(
            MatmulAudit(**dict(zip(names, key, strict=True)), calls=calls, fp8=self._losses(key, steps))  # type: ignore[arg-type]
            for key, calls in self._calls.items()
        )


class Functions(TorchFunctionMode):
    def __init__(self, place: AuditPlace, operators: Operators) -> None:
        super().__init__()
        self._place, self._operators = place, operators
        self._calls: dict[tuple[str, Rule, Types, Types, Types], int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = op_name(func)
        before = len(self._operators.names)
        result = func(*args, **(kwargs or {}))
        if not self._place.is_counting and op not in MOVES and op not in _ATTRIBUTES:
            self._note(op, (args, kwargs), result, self._operators.names[before:])
        return result

    def _note(self, op: str, given: Any, result: Any, ran: list[str]) -> None:
        inputs, outputs = floats_in(given), floats_in(result)
        if not inputs or not outputs:
            return
        device_type = next(tensor.device.type for tensor in tensors_in(result))
        rule, parts = rule_of(op, device_type, ran)
        if rule == "cast" and inputs == outputs:
            return  # it was of that type already
        if rule != "cast" and not torch.is_autocast_enabled(device_type):
            rule, parts = "off", ()
        key = (op, rule, inputs, outputs, parts)
        self._calls[key] = self._calls.get(key, 0) + 1

    def operations(self) -> tuple[OperationAudit, ...]:
        return tuple(
            OperationAudit(op=op, rule=rule, inputs=inputs, outputs=outputs, calls=calls, parts=parts)
            for (op, rule, inputs, outputs, parts), calls in self._calls.items()
        )


def types_in(value: Any) -> dict[str, None]:
    return dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors_in(value))


def floats_in(value: Any) -> Types:
    return tuple(dict.fromkeys(dtype_name(t.dtype) for t in tensors_in(value) if t.is_floating_point()))
