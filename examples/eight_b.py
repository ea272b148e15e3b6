"""An 8b model on two GPUs, a sequence of 32,768 tokens on each: torchrun --nproc-per-node 2 examples/eight_b.py
FSDP2 splits weights, gradients and optimizer state; of what a block's backward pass needs, the compiler keeps the share
BUDGET and computes the rest again; the loss is computed in chunks of the logits."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import silu

from steplab.ops.attention import attention
from steplab.ops.cross_entropy import linear_cross_entropy

LAYERS, WIDTH, FF, HEADS, VOCABULARY, CONTEXT = 34, 4096, 11008, 32, 151_936, 32_768
ATTENTION, LOSS, BUDGET, WARM_UP, STEPS = "flash_triton", "fused", 0.4, 3, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * FF, bias=False), nn.Linear(FF, WIDTH, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        qkv_3BHTD = self.qkv(self.norm_1(x_BTC)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        a, b = qkv_3BHTD[:2].chunk(2, -1)  # queries and keys get rotary positions
        q_BHTD, k_BHTD = torch.cat((a * cos_TD - b * sin_TD, b * cos_TD + a * sin_TD), -1).to(x_BTC.dtype)
        o_BHTD = attention(q_BHTD, k_BHTD, qkv_3BHTD[2], causal=True, implementation=ATTENTION)
        x_BTC = x_BTC + self.out(o_BHTD.transpose(1, 2).flatten(2))
        gate_BTF, up_BTF = self.gate_up(self.norm_2(x_BTC)).chunk(2, -1)
        return x_BTC + self.down(silu(gate_BTF) * up_BTF)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, cos_TD, sin_TD)
        return linear_cross_entropy(self.norm(x_BTC), self.head.weight, targets_BT, implementation=LOSS)


def main(device: torch.device) -> Tensor:
    torch._functorch.config.activation_memory_budget = BUDGET
    with torch.device("meta"):
        model = Model().bfloat16()
    for block in model.blocks:
        block.forward = torch.compile(block.forward)  # FSDP2's hooks stay outside
        fully_shard(block)
    fully_shard(model).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    frequency_D = 1e4 ** (torch.arange(0, WIDTH // HEADS, 2, device=device) * -HEADS / WIDTH)
    angle_TD = torch.outer(torch.arange(CONTEXT, device=device), frequency_D)
    tokens_BT, times = torch.randint(VOCABULARY, (1, CONTEXT + 1), device=device), []
    for _ in range(WARM_UP + STEPS + 1):
        dist.barrier()
        times.append(time.perf_counter())
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:], angle_TD.cos(), angle_TD.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}: loss {loss.item():.3f}", flush=True)  # waits for the whole step
    return torch.tensor(times, dtype=torch.float64).diff()[WARM_UP:]


if __name__ == "__main__":
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_node_local_rank())
    print(f"median {main(torch.device('cuda')).median():.3f} s, peak {torch.cuda.max_memory_allocated():,} bytes")
    dist.destroy_process_group()
