"""What a block of examples/eight_b.py keeps for its backward pass, as torch's compiler divides it.

    python -m benchmarks.eight_b_kept [0.4 0.65 products ...]

A number is torch's activation_memory_budget; `products` is steplab's selective checkpointing, which keeps the outputs
of matrix products and of attention, and the rotated heads in place of the product that they are made of. The block is
traced at its full size on tensors without content, so a CPU does. Weights and rotary tables are not counted, because
they are there anyway, and views of one tensor count once. On a CPU, TRITON_INTERPRET=1 lets the block's operators be
traced.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch
from examples import eight_b
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from steplab.model.checkpointing import kept_by_selective


def kept_by(choice: str) -> dict[str, Tensor]:
    """The tensors that a block hands from its forward to its backward pass, by their names in the graph."""
    forwards: list[GraphModule] = []

    def keep(graph: GraphModule, _: object) -> Callable[..., Any]:
        forwards.append(graph)
        return graph.forward

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=lambda graph, _: graph.forward,
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    torch._dynamo.reset()
    with FakeTensorMode(), functorch.patch(activation_memory_budget=1.0 if choice == "products" else float(choice)):
        torch.set_default_dtype(torch.bfloat16)
        block = eight_b.Block()
        x_BTC = torch.empty(1, eight_b.CONTEXT, eight_b.WIDTH, requires_grad=True)
        torch.set_default_dtype(torch.float32)
        rotary_2TD = torch.empty(2, eight_b.CONTEXT, eight_b.WIDTH // eight_b.HEADS // 2)
        forward: Callable[..., Any] = block.forward
        if choice == "products":
            contexts = partial(create_selective_checkpoint_contexts, kept_by_selective(is_compiled=True))
            forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        torch.compile(forward, backend=backend, dynamic=False)(x_BTC, rotary_2TD)
    *_, output = forwards[0].graph.nodes
    saved = {node.name: node.meta["val"] for node in output.args[0][1:]}
    return {name: value for name, value in saved.items() if isinstance(value, Tensor) and value.dim() > 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="*", default=["0.4", "0.6", "0.65", "1.0", "products"])
    for choice in parser.parse_args().choices:
        tensors = {
            name: tensor
            for name, tensor in kept_by(choice).items()
            if not name.startswith("primals") or (tensor.dim() == 3 and tensor.dtype == torch.bfloat16)  # the input
        }
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors.values()}
        print(f"{choice}: {sum(storages.values()) / 1e6:,.0f} MB a block")
        for name, tensor in tensors.items():
            print(f"    {name:12} {tuple(tensor.shape)} {tensor.dtype}")


if __name__ == "__main__":
    main()
