"""SwiGLU as the formula reads (Shazeer 2020, "GLU Variants Improve Transformer"), in the precision of its input.

Shape suffixes: F inner width of the feed-forward block.
"""

from torch import Tensor
from torch.nn.functional import silu


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2F], the gate in the first half of the last dimension: [..., F]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
