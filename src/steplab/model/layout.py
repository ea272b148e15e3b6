"""Splits the plain Transformer over tensor-parallel ranks, and into pipeline stages.

The linear layers `query`, `key`, `value`, `gate` and `up` are split by outputs, `output` and `down` by inputs. So
attention and the feed-forward part need no communication inside (Shoeybi et al. 2019, "Megatron-LM"). Between them, in
norms and the residual stream, each rank has some tokens of each sequence. An all-gather of tokens precedes each part,
and a reduce-scatter of its sums follows (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models"). The embedding and learned positions are split by rows, the head by outputs; the loss reads split
logits. With grouped heads a rank has whole heads of keys and values, and the query heads that read them.

A stage is a run of consecutive blocks with the whole model's parameter names. Shape suffixes as in transformer.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from steplab.model.transformer import Block, LossFn, Transformer, embed
from steplab.specs.layout import blocks_of_stage
from steplab.specs.model import TransformerShape

_TOKENS = Shard(1)
"""DTensor placement of a tensor [B, T, ...] with T / tp tokens on each rank."""


def tensor_plan(shape: TransformerShape) -> dict[str, ParallelStyle]:
    """The ParallelStyle of each submodule of Transformer or of TransformerStage, by name."""
    *wide, last = shape.feed_forward_layers
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=_TOKENS),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=_TOKENS),
    }
    if shape.learned_positions:
        plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    for part, by_outputs, by_inputs in (
        ("attention", ("query", "key", "value"), "output"),
        ("feed_forward", tuple(wide), last),
    ):
        plan[f"blocks.*.{part}_norm"] = SequenceParallel()
        others = (None,) if part == "attention" else ()  # the table of angles
        plan[f"blocks.*.{part}"] = PrepareModuleInput(
            input_layouts=(_TOKENS, *others), desired_input_layouts=(Replicate(), *others)
        )
        plan |= {f"blocks.*.{part}.{name}": ColwiseParallel() for name in by_outputs}
        plan[f"blocks.*.{part}.{by_inputs}"] = RowwiseParallel(output_layouts=_TOKENS)
    return plan


def arrive_whole(embedding: nn.Module) -> None:
    """Clone the embedding's output for compiled blocks.

    Otherwise it may be a running collective, wrapped in a torch tensor class, and a compiled block returns an unusable
    gradient for it.
    """
    embedding.register_forward_hook(lambda module, inputs, output: output.clone())


def loss_over_ranks(loss: LossFn, mesh: DeviceMesh) -> LossFn:
    """A loss function for logits split by vocabulary, [N, V / tp] on each rank of a mesh of one axis.

    Call it, and its backward pass, within torch's `loss_parallel`. `loss` must be torch's cross_entropy.
    """

    def of_parts(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        whole_NV = DTensor.from_local(logits_NV, mesh, [Shard(1)])
        mean: DTensor = loss(whole_NV, targets_N)  # type: ignore[assignment]
        return mean.to_local()

    return of_parts


Around = Callable[[], AbstractContextManager[object]]


def blocks_of(module: "Transformer | TransformerStage") -> dict[int, Block]:
    return {int(name): block for name, block in module.blocks.named_children() if isinstance(block, Block)}


class TransformerStage(nn.Module):
    """A pipeline stage: takes tokens (first stage) or the residual stream, returns the residual stream or logits (last
    stage).
    """

    rotary_2TD: Tensor | None  # noqa: N815 (a shape suffix)

    def __init__(self, whole: Transformer, number: int, num_stages: int, around: Around = nullcontext) -> None:
        super().__init__()
        self.around = around
        self.embedding = whole.embedding if number == 0 else None
        self.positions = whole.positions if number == 0 else None
        indices = blocks_of_stage(number, num_stages, len(whole.blocks))
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in indices})
        last = number == num_stages - 1
        self.norm = whole.norm if last else None
        self.head = whole.head if last else None
        self.register_buffer("rotary_2TD", whole.rotary_2TD, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens [B, T] or the residual stream [B, T / tp, C]."""
        with self.around():
            x_BTC = embed(x, self.embedding, self.positions) if self.embedding is not None else x
            for block in self.blocks.values():
                x_BTC = block(x_BTC, self.rotary_2TD)
            if self.norm is None or self.head is None:
                return x_BTC
            logits_BTV: Tensor = self.head(self.norm(x_BTC))
            return logits_BTV


def cut(whole: Transformer, numbers: Sequence[int], num_stages: int, around: Around) -> list[TransformerStage]:
    """The pipeline stages with these numbers; `around` makes a context for each forward pass of a stage.

    `whole` is emptied, so that parameters of other stages are freed.
    """
    stages = [TransformerStage(whole, number, num_stages, around) for number in numbers]
    del whole.embedding, whole.positions, whole.blocks, whole.norm, whole.head
    return stages
