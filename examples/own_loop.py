"""A training loop of one's own, recorded into the same store: python examples/own_loop.py && steplab list"""

import torch
from torch import nn

import steplab

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
batches = [torch.randn(64, 256, device=device) for _ in range(25)]
flops = 6 * sum(parameter.numel() for parameter in model.parameters()) * 64  # the rule of thumb, for 64 rows a step

with steplab.recorder("own loop", flops_per_step=flops, precision="fp32") as rec:
    for batch in batches:
        with rec.step():
            with rec.phase("forward"):
                loss = (model(batch) - batch).square().mean()
            with rec.phase("backward"):
                loss.backward()
            with rec.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
