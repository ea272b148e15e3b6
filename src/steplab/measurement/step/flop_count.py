"""Counts a step's FLOPs through torch, for models without a closed form here."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from steplab.measurement.clock import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedFlops:
    executed: float
    needed: float | None
    """FLOPs without recomputation; None if the step has no forward phase."""


def count_flops(phases: Sequence[Phase], device: torch.device) -> CountedFlops:
    """FLOPs of matmuls, convolutions and attention, backward included; runs a step once more, eagerly.

    Needed FLOPs are three forward passes (costs.flops), or fewer with frozen parameters. Causal attention counts the
    whole square, except steplab's operators, which count unmasked pairs.
    """
    # The counter has no formula for the fused attention of a CPU, and would count it as zero.
    backend = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
    eagerly = torch.compiler.set_stance("force_eager")
    forward: float | None = None
    with eagerly, backend, FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        for phase in phases:
            before = counter.get_total_flops()
            phase.run()
            if phase.name == "forward":
                forward = (forward or 0.0) + counter.get_total_flops() - before
    executed = float(counter.get_total_flops())
    return CountedFlops(executed=executed, needed=None if forward is None else min(3 * forward, executed))


def _formulas() -> dict[Any, Any]:
    aten = torch.ops.aten
    found: dict[Any, Any] = {aten._grouped_mm: _grouped_flops} if hasattr(aten, "_grouped_mm") else {}
    for kind in ("flash", "efficient", "cudnn"):
        found[getattr(aten, f"_scaled_dot_product_{kind}_attention")] = partial(_attention_flops, backward=False)
        found[getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")] = partial(
            _attention_flops, backward=True
        )
    return found


def _attention_flops(*shapes: Any, backward: bool, out_shape: object = None, **_: object) -> int:
    """FLOPs over the whole square: two products forward, five backward, of all query heads."""
    (batch, heads, queries, width), key, value = shapes[backward : backward + 3]
    columns = 3 * width + 2 * value[-1] if backward else width + value[-1]
    return int(2 * batch * heads * queries * key[-2] * columns)


def _grouped_flops(a: Sequence[int], b: Sequence[int], *_: object, out_shape: object = None, **__: object) -> int:
    return 2 * a[-2] * a[-1] * b[-1]
