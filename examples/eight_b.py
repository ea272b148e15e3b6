"""An 8b model on two GPUs, a sequence of 32,768 tokens on each.

    torchrun --nproc-per-node 2 examples/eight_b.py [--fp8]

FSDP2 splits weights, gradients and optimizer state. The outputs of products and of attention are kept for the backward
pass; the rest is computed again, in one kernel each. The loss is in chunks of the logits. With --fp8 the products of
blocks take operands in fp8 (docs/fp8.md)."""

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from steplab.model.checkpointing import wrap_block
from steplab.model.transformer import rotary_table
from steplab.ops.attention import attention
from steplab.ops.cross_entropy import linear_cross_entropy
from steplab.ops.fp8.linear import fp8_heads, fp8_linear, fp8_swiglu
from steplab.ops.rms_norm import add_rms_norm, add_rms_norm_amax
from steplab.ops.rotary_heads import rotary_heads
from steplab.ops.swiglu import swiglu

LAYERS, WIDTH, FF, HEADS, VOCABULARY, CONTEXT = 34, 4096, 11008, 32, 151_936, 32_768
ATTENTION, LOSS, EPS, WARM_UP, STEPS = "flash_triton", "fused", 1e-5, 3, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH, EPS), nn.RMSNorm(WIDTH, EPS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * FF, bias=False), nn.Linear(FF, WIDTH, bias=False)

    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor) -> Tensor:
        qkv_BHTD = rotary_heads(self.qkv(self.norm_1(x_BTC)), rotary_2TD, HEADS)
        o_BHTD = attention(*qkv_BHTD, causal=True, implementation=ATTENTION)
        branch_BTC = self.out(o_BHTD.transpose(1, 2).flatten(2))
        normed_BTC, x_BTC = add_rms_norm(x_BTC, branch_BTC, self.norm_2.weight, EPS)
        return x_BTC + self.down(swiglu(self.gate_up(normed_BTC)))


class Fp8Block(Block):
    def forward(self, x_BTC: Tensor, rotary_2TD: Tensor) -> Tensor:
        qkv_BHTD = fp8_heads(self.norm_1(x_BTC), self.qkv.weight, rotary_2TD, HEADS)
        o_BHTD = attention(*qkv_BHTD, causal=True, implementation=ATTENTION)
        branch_BTC = fp8_linear(o_BHTD.transpose(1, 2).flatten(2), self.out.weight)
        normed_BTC, x_BTC, amax = add_rms_norm_amax(x_BTC, branch_BTC, self.norm_2.weight, EPS)
        return x_BTC + fp8_swiglu(normed_BTC, self.gate_up.weight, self.down.weight, x_amax=amax)


BLOCK = Fp8Block if "--fp8" in sys.argv else Block


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(BLOCK() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH, EPS), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, rotary_2TD: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotary_2TD)
        return linear_cross_entropy(self.norm(x_BTC), self.head.weight, targets_BT, implementation=LOSS)


def main(device: torch.device) -> Tensor:
    with torch.device("meta"):
        model = Model().bfloat16()
    for index, block in enumerate(model.blocks):  # FSDP2's hooks stay outside of compiled code
        wrap_block(block, index, checkpointing="selective", compile_mode="block", split=False)
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rotary_2TD = rotary_table(CONTEXT, WIDTH // HEADS).to(device)
    tokens_BT, times = torch.randint(VOCABULARY, (1, CONTEXT + 1), device=device), []
    for _ in range(WARM_UP + STEPS + 1):
        dist.barrier()
        times.append(time.perf_counter())
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:], rotary_2TD)
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
