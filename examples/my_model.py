"""A model of one's own, measured by name: steplab run --model examples.my_model:build --context 64

The function takes those of `batch`, `context`, `device` and `seed` that it wants, by name. It returns a module, whose
loss is a scalar, alone or in a tuple, and a function that makes one batch for it. Blocks in an nn.ModuleList can be
compiled one by one (--compile block) and sharded over GPUs (--layout fsdp=2).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCAB_SIZE = 5_000


class Block(nn.Module):
    """Causal attention, then a feed-forward part, each after a norm and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.movedim(-3, 0).transpose(-3, -2)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(-3, -2).flatten(-2))
        return x + self.feed_forward(self.norm_2(x))


class GPT(nn.Module):
    """Gives the logits of the next token and, as training needs it, the loss."""

    def __init__(self, context: int, width: int = 128, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB_SIZE, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(batch: int, context: int, device: torch.device) -> tuple[nn.Module, object]:
    """What steplab calls."""

    def make_batch() -> tuple[Tensor, Tensor]:
        text = torch.randint(VOCAB_SIZE, (batch, context + 1), device=device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return GPT(context), make_batch
