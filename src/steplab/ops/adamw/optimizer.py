"""AdamW whose step is one kernel for all parameters of a group."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steplab.errors import Unsupported, UserError
from steplab.ops.adamw import block
from steplab.ops.adamw.reference import Rates

_ALIGNMENT = 16


class OneKernelAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for contiguous float32 parameters on CUDA (or on a CPU under TRITON_INTERPRET=1).

    Its state has the names that torch's has, so that either loads what the other has saved. The number of steps is kept
    on the host, so a step cannot be captured as a CUDA graph.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise UserError("AdamW takes lr, eps and weight_decay of at least 0 and betas from 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._tables: dict[tuple[int, int], _Tables] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                _refuse_unserved(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; gives what the closure does."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for index, group in enumerate(self.param_groups):
            for number, tensors in self._by_step(group["params"]).items():
                rates = Rates(
                    lr=float(group["lr"]),
                    beta_1=group["betas"][0],
                    beta_2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=number,
                )
                key = (index, len(tensors))
                tables = self._tables[key] = _tables_for(tensors, self._tables.get(key))
                _start(tables, rates)
        return loss

    def _by_step(self, parameters: Sequence[Tensor]) -> dict[int, list["Tensors"]]:
        """What has a gradient, by the number of its step: as a rule all of them are in the same."""
        found: dict[int, list[Tensors]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            found.setdefault(int(state["step"]), []).append(tensors)
        return found


Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""A parameter, its gradient and its two moments."""


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
        for tensor in each:
            _refuse_unserved(tensor)
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


def _start(tables: _Tables, rates: Rates) -> None:
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
            num_warps=block.NUM_WARPS,
        )


def _refuse_unserved(tensor: Tensor) -> None:
    instead = "use torch.optim.AdamW for it"
    if tensor.device.type != "cuda" and not (tensor.is_cpu and os.environ.get("TRITON_INTERPRET") == "1"):
        raise Unsupported(f"AdamW in one kernel on {tensor.device.type}", "its kernel is for CUDA", instead)
    if tensor.dtype != torch.float32:
        raise Unsupported(f"AdamW in one kernel for {tensor.dtype}", "it computes in float32", instead)
    if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
        why = f"it takes contiguous tensors that begin at a multiple of {_ALIGNMENT} bytes"
        raise Unsupported(f"AdamW in one kernel for a tensor of strides {tensor.stride()}", why, instead)
