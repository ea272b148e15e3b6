"""A loop with Accelerate, recorded: python examples/accelerate_loop.py, or by `accelerate launch`

In several processes the recorder is opened once Accelerate has made the process group, and the record has every rank.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steplab

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
batches = DataLoader(TensorDataset(torch.randn(25 * 64 * accelerator.num_processes, 256)), batch_size=64)
model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches)

with steplab.recorder("accelerate loop", device=accelerator.device, model=model) as rec:
    for (batch,) in batches:
        with rec.step():
            with rec.phase("forward"):
                loss = (model(batch) - batch).square().mean()
            with rec.phase("backward"):
                accelerator.backward(loss)
            with rec.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
accelerator.end_training()
