"""What makes sparse gradients, which neither buckets nor shards can hold."""

import torch
from torch import Tensor, nn

from steplab.errors import Unsupported


def refuse_sparse(module: nn.Module, doing: str, holders: str) -> None:
    """Raise Unsupported for an embedding with sparse gradients; `holders` are what would hold them: 'buckets'."""
    for name, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse:
            raise Unsupported(
                f"{doing} of {name or 'a module'} with sparse gradients",
                f"{holders} hold gradients with all their elements",
                "build the embedding with sparse=False",
            )


def refuse_sparse_gradient(name: str, gradient: Tensor) -> None:
    """Raise Unsupported for a gradient that is sparse all the same, as that of torch.nn.functional.embedding may be."""
    if gradient.layout is not torch.strided:
        why = "buckets hold gradients with all their elements"
        raise Unsupported(f"data parallelism with a sparse gradient of {name}", why, "use sparse=False")
