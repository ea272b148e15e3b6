"""A training loop of one's own, recorded into the same store: python examples/own_loop.py && steplab show last"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import steplab

device = "cuda" if torch.cuda.is_available() else "cpu"
vocab_size, batch, context = 5_000, 4, 64
model = nn.Sequential(
    nn.Embedding(vocab_size, 128),
    nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, norm_first=True, batch_first=True),
    nn.Linear(128, vocab_size),
).to(device)
optimizer = torch.optim.AdamW(model.parameters())
# For MFU by the rule of thumb: 6 FLOPs per parameter and token.
flops = 6 * sum(parameter.numel() for parameter in model.parameters()) * batch * context

with steplab.recorder("own loop", tokens_per_step=batch * context, flops_per_step=flops, precision="fp32") as rec:
    for _ in range(25):
        text = torch.randint(vocab_size, (batch, context + 1), device=device)
        with rec.step():
            with rec.phase("forward"):
                loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            with rec.phase("backward"):
                loss.backward()
            with rec.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
