"""AdamW whose step is one kernel for all parameters of a group."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steplab.errors import Unsupported, UserError
from steplab.ops.adamw import block
from steplab.ops.adamw.reference import Rates, adamw_step

_ALIGNMENT = 16
_IN_FLOAT32 = ("master", "exp_avg", "exp_avg_sq")
"""What the state has of each element of a parameter; `master` is there of bfloat16 weights alone."""


class OneKernelAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for contiguous float32 parameters, and for bfloat16 weights that have float32 masters.

    The kernel is for CUDA, and for a CPU under TRITON_INTERPRET=1; elsewhere a step is made by operators of torch, one
    parameter after the other, which is not fast.

    A step reads the bfloat16 gradient of such a weight, updates its master and moments in float32 and writes the
    rounded master to the weight: 28 bytes a parameter, as many as of a float32 parameter (Micikevicius et al. 2018,
    "Mixed Precision Training", section 3.1).

    Its state has the names that torch's has, and `master`, so that either loads what the other has saved. The number of
    steps is kept on the host, so a step cannot be captured as a CUDA graph.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        masters: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """`masters` has the float32 values of each bfloat16 parameter, as `bf16_with_masters` gives them; the
        optimizer keeps these tensors and updates them in place."""
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise UserError("AdamW takes lr, eps and weight_decay of at least 0 and betas from 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._tables: dict[tuple[int, bool, int], _Tables] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                master = (masters or {}).get(parameter)
                if master is not None:
                    self.state[parameter]["master"] = master
                _refuse_unserved_parameter(parameter, master)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments and masters; each parameter that was saved with a master then has its value, rounded where the
        parameter is bfloat16. Of a state without masters, such as torch's own, the masters stay what they are."""
        masters = {parameter: state["master"] for parameter, state in self.state.items() if "master" in state}
        super().load_state_dict(state_dict)
        # torch casts what it loads to the parameter's type, which would round the state of a bfloat16 weight.
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            state, saved = self.state[parameter], state_dict["state"].get(number, {})
            state |= {name: saved[name].to(parameter.device, torch.float32) for name in _IN_FLOAT32 if name in saved}
            master = state.pop("master", masters.get(parameter))
            if master is not None:
                parameter.copy_(master)
            if parameter in masters:
                state["master"] = master

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; gives what the closure does."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for index, group in enumerate(self.param_groups):
            for (number, has_masters), tensors in self._by_step(group["params"]).items():
                rates = Rates(
                    lr=float(group["lr"]),
                    beta_1=group["betas"][0],
                    beta_2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=number,
                )
                if not _runs_kernels(tensors[0][0].device):
                    _update_by_torch(tensors, rates)
                    continue
                key = (index, has_masters, len(tensors))
                tables = self._tables[key] = _tables_for(tensors, self._tables.get(key))
                _start(tables, rates, has_masters=has_masters)
                if has_masters and not tables.counts.is_cuda:  # the interpreter cuts off what a GPU rounds
                    _round_to_weights(tensors)
        return loss

    def _by_step(self, parameters: Sequence[Tensor]) -> dict[tuple[int, bool], list["Tensors"]]:
        """What has a gradient, by the number of its step, as a rule the same of all, and by whether it has a master."""
        found: dict[tuple[int, bool], list[Tensors]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            master = state.get("master")
            values = parameter if master is None else master
            if "step" not in state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
            state["step"] += 1
            tensors = (values, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            weight = () if master is None else (parameter,)
            found.setdefault((int(state["step"]), master is not None), []).append((*tensors, *weight))
        return found


Tensors = tuple[Tensor, ...]
"""What is updated in float32, its gradient and its two moments; then the bfloat16 weight, if that is another tensor."""


@dataclass(frozen=True, slots=True)
class _Tables:
    """What the kernel has to know of the tensors, on their device."""

    where: list[list[int]]
    """Addresses, as they are in `addresses`."""
    sizes: list[int]
    """Elements, as they are in `counts`."""
    addresses: Tensor
    counts: Tensor
    firsts: Tensor
    tensors: Tensor


def _tables_for(tensors: Sequence[Tensors], before: _Tables | None) -> _Tables:
    """Those of the step before, where nothing has moved; else what has changed is copied to the device."""
    device = tensors[0][0].device
    where = [[tensor.data_ptr() for tensor in each] for each in tensors]
    sizes = [each[0].numel() for each in tensors]
    is_alike = before is not None and before.sizes == sizes and before.counts.device == device
    if before is not None and is_alike and before.where == where:
        return before
    for each in tensors:
        _refuse_unserved_tensors(*each)
    addresses = _on(device, torch.tensor(where))
    if before is not None and is_alike:
        return _Tables(where, sizes, addresses, before.counts, before.firsts, before.tensors)
    counts = torch.tensor(sizes)
    blocks = -(-counts // block.ADAMW_BLOCK)
    firsts = blocks.cumsum(0) - blocks
    which = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), blocks)
    return _Tables(where, sizes, addresses, *(_on(device, table) for table in (counts, firsts, which)))


def _on(device: torch.device, table: Tensor) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _start(tables: _Tables, rates: Rates, *, has_masters: bool) -> None:
    from steplab.ops.adamw.kernel import adamw_kernel

    if not len(tables.tensors):
        return
    # Triton starts kernels on the current device, whatever the tensors' is.
    with torch.cuda.device(tables.counts.device) if tables.counts.is_cuda else nullcontext():
        adamw_kernel[(len(tables.tensors),)](
            tables.addresses,
            tables.counts,
            tables.firsts,
            tables.tensors,
            rates.decay,
            1 - rates.beta_1,
            1 - rates.beta_2,
            rates.step_size,
            rates.second_correction,
            rates.eps,
            BLOCK=block.ADAMW_BLOCK,
            HAS_MASTERS=has_masters,
            num_warps=block.NUM_WARPS,
        )


def _runs_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def _update_by_torch(tensors: Sequence[Tensors], rates: Rates) -> None:
    for values, gradient, first, second, *_ in tensors:
        adamw_step(values, gradient.to(values.dtype), first, second, rates)
    _round_to_weights(tensors)


def _round_to_weights(tensors: Sequence[Tensors]) -> None:
    for values, _gradient, _first, _second, *weights in tensors:
        for weight in weights:
            weight.copy_(values)


def _refuse_unserved_parameter(parameter: Tensor, master: Tensor | None) -> None:
    _refuse_unserved(parameter)
    if master is None:
        _refuse_other_types(parameter, torch.float32, "parameter", "without a master it updates float32 parameters")
        return
    _refuse_unserved(master)
    _refuse_other_types(parameter, torch.bfloat16, "weight", "one that has a master is bfloat16")
    _refuse_other_types(master, torch.float32, "master", "it updates float32 masters")
    if master.shape != parameter.shape:
        raise UserError(f"a weight of shape {tuple(parameter.shape)} was given a master of shape {tuple(master.shape)}")


def _refuse_unserved_tensors(values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *weight: Tensor) -> None:
    for tensor in (values, gradient, first, second, *weight):
        _refuse_unserved(tensor)
    _refuse_other_types(values, torch.float32, "parameter", "without a master it updates float32 parameters")
    gradient_type = torch.bfloat16 if weight else torch.float32
    _refuse_other_types(gradient, gradient_type, "gradient", f"that of such a weight is {gradient_type}")


def _refuse_other_types(tensor: Tensor, dtype: torch.dtype, what: str, why: str) -> None:
    if tensor.dtype != dtype:
        raise Unsupported(f"AdamW in one kernel for a {what} of {tensor.dtype}", why, _INSTEAD)


_INSTEAD = "use torch.optim.AdamW for it"


def _refuse_unserved(tensor: Tensor) -> None:
    if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
        why = f"it takes contiguous tensors that begin at a multiple of {_ALIGNMENT} bytes"
        raise Unsupported(f"AdamW in one kernel for a tensor of strides {tensor.stride()}", why, _INSTEAD)
