"""How the blocks of the plain Transformer are called: as they are, or so that backward recomputes their activations.

A checkpointed block keeps its input alone; its backward pass first runs its forward pass again, up to the last tensor
that it needs (torch's early stop), which spares the last matmul. The variant that needs no reentrant autograd is used:
it works under torch.compile and gives the same gradients, bit for bit. No random state is kept, as there is no dropout.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from steplab.model.transformer import BlockCaller, call_plainly
from steplab.ops.attention.operators import REFERENCE, TRITON
from steplab.specs.checkpointing import is_recomputed

_aten = torch.ops.aten
KEPT_BY_SELECTIVE = [
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    REFERENCE.forward,
    TRITON.forward,
]
"""Operators whose outputs selective checkpointing keeps: what is dear to compute for the bytes it yields."""


def block_caller(checkpointing: str) -> BlockCaller:
    """How to call a block under a StepSpec's `checkpointing`."""
    if checkpointing == "none":
        return call_plainly
    run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if checkpointing == "selective":
        contexts = partial(create_selective_checkpoint_contexts, KEPT_BY_SELECTIVE)
        run_again = partial(run_again, context_fn=contexts)

    def call(index: int, block: nn.Module, x_BTC: Tensor, rotary_2TD: Tensor) -> Tensor:
        if checkpointing == "selective" or is_recomputed(checkpointing, index):
            output: Tensor = run_again(block, x_BTC, rotary_2TD)
            return output
        return call_plainly(index, block, x_BTC, rotary_2TD)

    return call
