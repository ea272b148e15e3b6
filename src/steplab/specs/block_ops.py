"""Which steps can run steplab's kernels between the products of a block. It does not import specs.step, which asks."""

from steplab.errors import Unsupported
from steplab.specs.layout import Layout
from steplab.specs.model import ModelSpec

_PLAIN = "or --block-ops plain"


def refuse_unserved_block_ops(model: ModelSpec, layout: Layout, device: str) -> None:
    """Raise Unsupported for a model, a layout or a kind of device that the kernels do not serve. All three of them run,
    or none, so that the name of the choice says what was measured."""
    shape, what = model.shape, "block_ops triton with"
    if shape is None or shape.num_heads == 0:
        raise Unsupported(f"{what} {model.name}", "it has no block of steplab's Transformer", "use --block-ops plain")
    if shape.projections != "merged":
        why = "its kernels read queries, keys and values, and gate and up, from one tensor"
        raise Unsupported(f"{what} separate projections", why, f"use --model.projections merged, {_PLAIN}")
    if shape.norm != "rmsnorm" or shape.feed_forward != "swiglu" or shape.learned_positions:
        why = "its kernels are for RMSNorm, SwiGLU and rotary embedding"
        raise Unsupported(f"{what} {model.label}", why, "use --block-ops plain, or a model with these parts")
    if layout.world_size > layout.dp:
        why = "parameters are parts of tensors there"
        raise Unsupported(f"{what} layout {layout}", why, f"use dp={layout.world_size}, {_PLAIN}")
    if device == "mps":
        raise Unsupported(f"{what} device mps", "its kernels are for CUDA", "use --block-ops plain")
