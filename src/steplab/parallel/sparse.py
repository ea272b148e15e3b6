"""What makes sparse gradients, which neither buckets nor shards can hold."""

from torch import nn

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
