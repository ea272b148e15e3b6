"""AdamW with one kernel for all parameters of a group: float32, or bfloat16 with float32 masters.

Autocast rounds a linear layer's float32 weight to bfloat16 before each use, and casts its bfloat16 gradient to float32.
A bfloat16 weight, the rounded copy of a float32 master, gives the same numbers without these casts.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import triton_places
from .errors import Unsupported, UserError
from .triton_device import on_device_of
from .triton_places import runs_on


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its two moments in place: the reference, as the formula reads (Loshchilov and Hutter 2019,
    "Decoupled Weight Decay Regularization", algorithm 2). `step` counts from 1.
    """
    beta_1, beta_2 = betas
    first.add_((1 - beta_1) * (gradient - first))
    second.add_((1 - beta_2) * (gradient.square() - second))
    denominator = second.sqrt() * (1 - beta_2**step) ** -0.5 + eps
    parameter.mul_(1 - lr * weight_decay).sub_(lr / (1 - beta_1**step) * (first / denominator))


def bf16_with_masters(module: nn.Module, *, stay: Collection[Tensor] = ()) -> dict[Tensor, Tensor]:
    """Convert linear layers' weights and biases to bfloat16, in place; return their float32 values by parameter.

    Run the step under autocast as before. Parameters stay if they are in `stay`, not in float32, or shared with another
    kind of module (an embedding tied to the head). Load weights first: masters copy the current values.
    """
    staying = {id(parameter) for parameter in stay}
    linear: dict[int, nn.Parameter] = {}
    for each in module.modules():
        own = {id(parameter): parameter for parameter in each.parameters(recurse=False)}
        if type(each) is nn.Linear:
            linear |= own
        else:
            staying |= set(own)
    masters: dict[Tensor, Tensor] = {}
    for key, parameter in linear.items():
        if key not in staying and parameter.dtype == torch.float32:
            masters[parameter] = parameter.data
            parameter.data = parameter.data.to(torch.bfloat16)
    return masters


_ALIGNMENT = 16
_IN_FLOAT32 = ("master", "exp_avg", "exp_avg_sq")
_RATES = 3


class OneKernelAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for contiguous float32 parameters, and for bfloat16 weights with float32 masters.

    The kernel runs on CUDA, and on a CPU under TRITON_INTERPRET=1; elsewhere torch's operators do, which is slow. For a
    bfloat16 weight, a step reads the bfloat16 gradient, updates master and moments in float32 and writes the rounded
    master (Micikevicius et al. 2018, "Mixed Precision Training", section 3.1). It moves 28 bytes a parameter, as in
    float32.

    The state has torch's names and `master`, so either class loads the other's. A CUDA graph can capture a step after
    one step outside of it. Keep the optimizer as long as the graph, and pass a changing learning rate as a tensor on
    the device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        masters: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """masters: float32 values of bfloat16 parameters, from `bf16_with_masters`; a step updates them in place.

        `step` raises UserError for a weight that differs from its master.
        """
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise UserError("AdamW takes lr, eps and weight_decay of at least 0 and betas from 0 to below 1")
        self._masters = masters or {}  # for add_param_group
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._masters = {}
        self._tables: dict[Tensor, _Tables] = {}  # of tensors updated together, by the first of them
        self._of_graphs: list[_Tables] = []  # read by CUDA graphs, in CPU and in device memory
        self._versions: dict[Tensor, int] = {}  # of bfloat16 weights after their last step; autograd counts changes

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_masters", {})
        self.__dict__.setdefault("_tables", {})
        self.__dict__.setdefault("_of_graphs", [])
        self.__dict__.setdefault("_versions", {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raises Unsupported, and adds nothing, for unsupported options and parameters."""
        _refuse_other_options(param_group)
        super().add_param_group(param_group)
        added = self.param_groups.pop()
        for parameter in added["params"]:
            master = self._masters.get(parameter)
            _refuse_unserved_parameter(*([parameter] if master is None else [master, parameter]))
        self.param_groups.append(added)
        for parameter in added["params"]:
            if parameter in self._masters:
                self.state[parameter]["master"] = self._masters[parameter]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments and masters. A state without masters, as torch's, leaves them unchanged.

        Raises Unsupported for the state of AMSGrad, of `maximize`, or of Adam with coupled weight decay.
        """
        for group in state_dict["param_groups"]:
            _refuse_other_options(group)
        masters = {parameter: state["master"] for parameter, state in self.state.items() if "master" in state}
        self._tables.clear()  # they hold tensors of the replaced state
        super().load_state_dict(state_dict)
        # torch casts loaded tensors to the parameter's type, which would round a bfloat16 weight's state.
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            state, saved = self.state[parameter], state_dict["state"].get(number, {})
            state |= {name: saved[name].to(parameter.device, torch.float32) for name in _IN_FLOAT32 if name in saved}
            master = state.pop("master", None)
            if master is not None:
                parameter.copy_(master)
            if parameter in masters:  # the caller may hold it, and the next load must not change it
                state["master"] = masters[parameter] if master is None else masters[parameter].copy_(master)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with a gradient; return the closure's result.

        Raises Unsupported in a CUDA graph's capture without an earlier step, and UserError for a weight that differs
        from its master.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for (_, has_masters), tensors in self._with_gradients(group["params"]).items():
                self._update(tensors, group, has_masters=has_masters)
                if has_masters:
                    self._versions |= {weight: weight._version for *_, weight in tensors}
        return loss

    def _update(self, tensors: Sequence["Tensors"], group: dict[str, Any], *, has_masters: bool) -> None:
        if not runs_on(tensors[0][0].device.type):
            _update_by_torch(tensors, group)
            return
        key = tensors[0][0]
        if _is_captured(tensors[0][0]):
            tables = self._tables_in_capture(key, tensors)
        else:
            tables = self._tables[key] = _tables_for(tensors, self._tables.get(key))
        tables.settings.set(group)
        _start(tables, group, has_masters=has_masters)
        if has_masters and not tables.counts.is_cuda:  # the interpreter truncates where a GPU rounds
            _round_to_weights(tensors)

    def _with_gradients(self, parameters: Sequence[Tensor]) -> dict[tuple[torch.device, bool], list["Tensors"]]:
        found: dict[tuple[torch.device, bool], list[Tensors]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                why = "it reads gradients with all their elements"
                raise Unsupported("AdamW in one kernel for a sparse gradient", why, "build the embedding sparse=False")
            state = self.state[parameter]
            master = state.get("master")
            values = parameter if master is None else master
            if "step" not in state:
                if _is_captured(parameter):  # a replayed graph would write its zeros each time
                    why = "a parameter has no moments yet, which are made in a step outside of one"
                    raise Unsupported(
                        "AdamW in one kernel in a capture", why, "take a step of the same parameters before it"
                    )
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
            step = state["step"]
            if step.device != parameter.device or step.dtype != torch.float32:  # from torch's, which may be on the CPU
                state["step"] = step.to(parameter.device, torch.float32)
            tensors = (values, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            weight = () if master is None else (parameter,)
            changed = master is not None and self._versions.get(parameter) != parameter._version
            if changed and not _is_captured(parameter):  # comparing them waits for the device
                _refuse_other_values(parameter, master)
            found.setdefault((parameter.device, master is not None), []).append((*tensors, *weight))
        return found

    def _tables_in_capture(self, key: Tensor, tensors: Sequence["Tensors"]) -> "_Tables":
        """Tables with addresses that the graph copies from CPU memory in each replay.

        A capture cannot allocate that memory, so it takes the memory of the step before, which no later step uses.
        """
        before = self._tables.get(key)
        if before is None or before.on_host is None:
            why = "the tables of its tensors are made in a step outside of one"
            raise Unsupported("AdamW in one kernel as the first step before a capture", why, "take a step before each")
        if [each[0].numel() for each in tensors] != before.sizes:
            why = "the previous step was of other parameters; the tables hold their sizes"
            raise Unsupported("AdamW in one kernel in a capture", why, "take a step of the same parameters before it")
        for each in tensors:
            _refuse_unserved_tensors(*each)
        self._tables[key] = replace(before, on_host=None)
        self._of_graphs.append(before)
        before.on_host.copy_(torch.tensor(_addresses(tensors)))
        return replace(before, addresses=before.on_host.to(before.counts.device, non_blocking=True))


Tensors = tuple[Tensor, ...]
"""(values, gradient, exp_avg, exp_avg_sq, step), then the bfloat16 weight if `values` is its float32 master."""


class _Settings:
    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.empty(4, dtype=torch.float64, device=device)
        self._values: list[float] = []

    def set(self, group: dict[str, Any]) -> None:
        lr = group["lr"]
        follows = isinstance(lr, Tensor) and lr.device == self.on_device.device
        logarithms = [math.log(beta) if beta else -math.inf for beta in group["betas"]]
        values = [0.0 if follows else float(lr), *logarithms, float(group["weight_decay"])]
        if values != self._values:
            self.on_device.copy_(_on(self.on_device.device, torch.tensor(values, dtype=torch.float64)))
            self._values = values
        if follows:
            self.on_device[0].copy_(lr)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tables:
    where: list[list[int]]
    sizes: list[int]
    on_host: Tensor | None
    """CPU memory from which `addresses` was copied; None once a CUDA graph copies from it."""
    addresses: Tensor
    counts: Tensor
    firsts: Tensor
    tensors: Tensor
    rates: Tensor
    settings: _Settings


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _addresses(tensors: Sequence[Tensors]) -> list[list[int]]:
    return [[tensor.data_ptr() for tensor in each] for each in tensors]


def _tables_for(tensors: Sequence[Tensors], before: _Tables | None) -> _Tables:
    device = tensors[0][0].device
    where = _addresses(tensors)
    sizes = [each[0].numel() for each in tensors]
    is_alike = before is not None and before.sizes == sizes and before.counts.device == device
    if before is not None and is_alike and before.where == where:
        return before
    for each in tensors:
        _refuse_unserved_tensors(*each)
    on_host = _pinned(device, torch.tensor(where))
    addresses = on_host.to(device, non_blocking=True)
    if before is not None and is_alike:
        return replace(before, where=where, on_host=on_host, addresses=addresses)
    counts = torch.tensor(sizes)
    blocks = -(-counts // triton_places.ADAMW_BLOCK)
    firsts = blocks.cumsum(0) - blocks
    which = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), blocks)
    return _Tables(
        where=where,
        sizes=sizes,
        on_host=on_host,
        addresses=addresses,
        counts=_on(device, counts),
        firsts=_on(device, firsts),
        tensors=_on(device, which),
        rates=torch.empty(len(sizes), _RATES, device=device),
        settings=_Settings(device),
    )


def _pinned(device: torch.device, table: Tensor) -> Tensor:
    return table.pin_memory() if device.type == "cuda" else table


def _on(device: torch.device, table: Tensor) -> Tensor:
    return _pinned(device, table).to(device, non_blocking=True)


def _start(tables: _Tables, group: dict[str, Any], *, has_masters: bool) -> None:
    from .adamw_kernels import adamw_kernel, adamw_rates_kernel

    if not len(tables.tensors):
        return
    num_tensors, (beta_1, beta_2) = len(tables.sizes), group["betas"]
    with on_device_of(tables.counts):
        adamw_rates_kernel[(-(-num_tensors // triton_places.RATES_BLOCK),)](
            tables.addresses,
            tables.settings.on_device,
            tables.rates,
            num_tensors,
            BLOCK=triton_places.RATES_BLOCK,
            WIDTH=len(tables.where[0]),
            enable_fp_fusion=True,
            num_warps=triton_places.ADAMW_WARPS,
        )
        adamw_kernel[(len(tables.tensors),)](
            tables.addresses,
            tables.counts,
            tables.firsts,
            tables.tensors,
            tables.rates,
            1 - beta_1,
            1 - beta_2,
            group["eps"],
            BLOCK=triton_places.ADAMW_BLOCK,
            HAS_MASTERS=has_masters,
            enable_fp_fusion=True,
            num_warps=triton_places.ADAMW_WARPS,
        )


def _update_by_torch(tensors: Sequence[Tensors], group: dict[str, Any]) -> None:
    options = {"lr": float(group["lr"]), **{name: group[name] for name in ("betas", "eps", "weight_decay")}}
    for values, gradient, first, second, step, *_ in tensors:
        step += 1
        adamw_step(values, gradient.to(values.dtype), first, second, step=int(step), **options)
    _round_to_weights(tensors)


def _round_to_weights(tensors: Sequence[Tensors]) -> None:
    for values, _gradient, _first, _second, _step, *weights in tensors:
        for weight in weights:
            weight.copy_(values)


def _refuse_unserved_parameter(values: Tensor, weight: Tensor | None = None) -> None:
    """`values` is the parameter, or the master of a bfloat16 `weight`."""
    if weight is None:
        _refuse_unserved("parameter", values, torch.float32, "without a master it updates float32 parameters")
        return
    _refuse_unserved("weight", weight, torch.bfloat16, "a weight with a master is bfloat16")
    _refuse_unserved("master", values, torch.float32, "it updates float32 masters")
    if values.shape != weight.shape:
        raise UserError(f"a weight of shape {tuple(weight.shape)} was given a master of shape {tuple(values.shape)}")


def _refuse_other_values(weight: Tensor, master: Tensor) -> None:
    if not torch.equal(weight, master.to(weight.dtype)):
        raise UserError(
            f"a bfloat16 weight of shape {tuple(weight.shape)} differs from its master, and the "
            "step would overwrite it: load weights before bf16_with_masters, or load the optimizer's "
            "state with its masters too"
        )


def _refuse_other_options(group: Mapping[str, Any]) -> None:
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            raise Unsupported(f"AdamW in one kernel with {name}", "it has no such update", _INSTEAD)
    if not group.get("decoupled_weight_decay", True) and group.get("weight_decay"):
        raise Unsupported("AdamW in one kernel with Adam's weight decay", "it decouples weight decay", _INSTEAD)


def _refuse_unserved_tensors(
    values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, *weight: Tensor
) -> None:
    _refuse_unserved_parameter(values, *weight)
    gradient_type = torch.bfloat16 if weight else torch.float32
    _refuse_unserved("gradient", gradient, gradient_type, f"a weight in bfloat16 has one of {gradient_type}")
    for moment in (first, second):
        _refuse_unserved("moment", moment, torch.float32, "its moments are float32")


_INSTEAD = "use torch.optim.AdamW for it"
_PLAIN = (Tensor, torch.nn.Parameter)  # checked for thousands of tensors in each step


def _refuse_unserved(what: str, tensor: Tensor, dtype: torch.dtype, why_dtype: str) -> None:
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):  # it has no address
        why = "its elements are in tensors within it, as in a parameter that fully_shard has sharded"
        raise Unsupported(f"AdamW in one kernel for a {type(tensor).__name__}", why, _INSTEAD)
    if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
        why = f"it takes contiguous tensors that begin at a multiple of {_ALIGNMENT} bytes"
        raise Unsupported(f"AdamW in one kernel for a tensor of strides {tensor.stride()}", why, _INSTEAD)
    if tensor.dtype != dtype:
        raise Unsupported(f"AdamW in one kernel for a {what} of {tensor.dtype}", why_dtype, _INSTEAD)
