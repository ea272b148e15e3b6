"""A GPT as one writes it for a project, with faults that cost time: a mask made on the CPU in each step, `.item()` in
each step, a GELU by hand, plain attention, and a vocabulary of 50,257.

From the folder of this file, as tests/golden/own_model_h200_202611.jsonl.gz was recorded:

    steplab profile --model mygpt_gpu:build --batch 8 --context 1024 --precision bf16
    steplab profile --model mygpt_gpu:build --batch 8 --context 1024 --precision bf16 --compile default
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY, LONGEST = 50257, 1024


class GELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        s = (q @ k.transpose(-2, -1)) / math.sqrt(d // self.h)
        s = s.masked_fill(mask == 0, float("-inf")).softmax(-1)
        x = x + self.proj((s @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, d: int = 768, layers: int = 8, h: int = 12) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, d), nn.Embedding(LONGEST, d)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, VOCABULARY, bias=False)
        self.running = 0.0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        b, t = tokens.shape
        mask = torch.tril(torch.ones(t, t)).to(tokens.device)
        x = self.tok(tokens) + self.pos(torch.arange(t, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        loss = cross_entropy(self.head(self.ln(x)).view(b * t, -1), targets.view(-1))
        self.running += loss.item()
        return loss


def build(batch: int, context: int, device: torch.device) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    def make_batch() -> tuple[Tensor, ...]:
        tokens = torch.randint(VOCABULARY, (batch, context + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return GPT(), make_batch
