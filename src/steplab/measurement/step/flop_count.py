"""Counts the FLOPs of a step through torch as it runs, for models without a closed form here."""

from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from steplab.measurement.step.loop import Phase

_ALL_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def count_flops(phases: Sequence[Phase], device: torch.device) -> float:
    """FLOPs of the matmuls, convolutions and attention in one step, backward included; elementwise operators are not
    counted.

    Causal attention is counted as the whole square, except for steplab's own operators, which count only the pairs that
    their mask leaves. Runs the step once more, slowly.
    """
    # The counter has no formula for the fused attention of a CPU, and would count it as zero.
    backends = [SDPBackend.MATH] if device.type == "cpu" else _ALL_BACKENDS
    with sdpa_kernel(backends), FlopCounterMode(display=False) as counter:
        for phase in phases:
            phase.run()
    return float(counter.get_total_flops())
