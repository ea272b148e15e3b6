"""Calls the plain Transformer's blocks: unchanged, or with activations recomputed in the backward pass.

A checkpointed block keeps only its input. Its backward pass reruns its forward pass up to the last tensor that it needs
(torch's early stop), which skips the last matmul. torch's non-reentrant variant works under torch.compile, and gives
the same bits as no checkpointing. Random state is not kept, because the model has no dropout.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from steplab.model.compiling import compiled_forward
from steplab.model.transformer import BlockCaller, call_plainly
from steplab.ops import rotary_heads
from steplab.ops.attention.operators import REFERENCE, TRITON
from steplab.specs.checkpointing import SELECTIVE, is_recomputed

_aten = torch.ops.aten
_KEPT_BY_SELECTIVE = [
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    REFERENCE.forward_overload,
    TRITON.forward_overload,
]
"""Operators that selective checkpointing does not rerun: they are expensive for the size of their result."""
_KEPT_IF_COMPILED = [*_KEPT_BY_SELECTIVE, rotary_heads.OPERATOR.default]


_LINEAR = (_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default)


def selective_contexts(checkpointing: str, *, is_compiled: bool) -> Any:
    """Two contexts for torch's checkpoint, one for a block's forward pass and one for its recomputation.

    Compiled code also keeps queries, keys and values after rotary embedding (steplab::rotary_heads). The compiler then
    drops the output of the linear layer before it, which has as many bytes; eager code would keep both.
    """
    kept = _KEPT_IF_COMPILED if is_compiled else _KEPT_BY_SELECTIVE
    linear = Counter[bool]()

    def policy(context: Any, operator: OpOverload, *_: object, **__: object) -> CheckpointPolicy:
        if checkpointing == "selective_2" and operator in _LINEAR:
            linear[context.is_recompute] += 1
            if linear[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def block_caller(checkpointing: str) -> BlockCaller:
    if checkpointing == "none":
        return call_plainly
    recompute = _recompute(checkpointing, is_compiled=False)

    def call(index: int, block: nn.Module, x_BTC: Tensor, rotary_2TD: Tensor | None) -> Tensor:
        if is_checkpointed(checkpointing, index):
            return recompute(block, x_BTC, rotary_2TD)
        return call_plainly(index, block, x_BTC, rotary_2TD)

    return call


def wrap_block(block: nn.Module, index: int, *, checkpointing: str, compile_mode: str, split: bool) -> None:
    """Replace a block's forward pass in place by one that is compiled, recomputed in backward, or both.

    No parameter is renamed, and hooks on the block itself stay outside. The compiler also sees the recomputation, and
    decides what to keep. Exception: a fully recomputed block that is split over ranks reruns its compiled forward pass,
    because torch 2.13 would lose its DTensors' device mesh.

    Args:
        index: the block's place, from 0.
        split: True if the block's parameters are DTensors.
    """
    forward: Callable[..., Tensor] = block.forward
    recomputed = is_checkpointed(checkpointing, index)
    outside = split and checkpointing not in SELECTIVE
    if recomputed and not outside:
        forward = _recomputed(forward, checkpointing, is_compiled=compile_mode != "off")
    if compile_mode != "off":
        forward = compiled_forward(block, forward, compile_mode)
        block.compiled_within = True  # type: ignore[assignment]
    if recomputed and outside:
        forward = _recomputed(forward, checkpointing, is_compiled=False)
    block.forward = forward


def is_checkpointed(checkpointing: str, index: int) -> bool:
    return checkpointing in SELECTIVE or is_recomputed(checkpointing, index)


def _recomputed(forward: Callable[..., Tensor], checkpointing: str, *, is_compiled: bool) -> Callable[..., Tensor]:
    recompute = _recompute(checkpointing, is_compiled=is_compiled)

    def run(x_BTC: Tensor, rotary_2TD: Tensor | None) -> Tensor:
        return recompute(forward, x_BTC, rotary_2TD)

    return run


def _recompute(checkpointing: str, *, is_compiled: bool) -> Callable[..., Tensor]:
    """(block, x_BTC, rotary_2TD) -> block(x_BTC, rotary_2TD), with activations recomputed in backward."""
    run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if checkpointing in SELECTIVE:
        run_again = partial(run_again, context_fn=partial(selective_contexts, checkpointing, is_compiled=is_compiled))
    return run_again
