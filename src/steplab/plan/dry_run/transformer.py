"""Repeats model/transformer.py and model/fused_block.py line by line in the dry run's operators.

The operators of model/fused_block.py are those of ops/rms_norm, ops/rotary_heads and ops/swiglu.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from steplab.ops.triton_places import NUM_PROGRAMS
from steplab.plan.dry_run.attention import Attend, merge_heads, rotate, split_heads
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.operators import (
    activation,
    add,
    add_positions,
    columns,
    cross_entropy,
    embedding,
    fp8_linear,
    gather,
    layer_norm,
    learned_positions,
    linear,
    multiply,
    rms_norm,
    scatter,
)
from steplab.plan.dry_run.sizes import FP32, Count, Sizes, together
from steplab.plan.dry_run.tape import run_backward
from steplab.plan.dry_run.tensors import Tensor
from steplab.specs.checkpointing import SELECTIVE, is_recomputed

Named = dict[str, Parameter]
"""Weights and biases of a block by their names within it: query.weight."""

HeadLoss = Callable[[Machine, Tensor, Parameter], Tensor]
"""(machine, x_BTC, weight_VC) -> loss"""


class Parameters:
    def __init__(self, m: Machine) -> None:
        sizes, shape = m.sizes, m.sizes.shape
        tied = shape.head == "tied"
        self.embedding = Parameter(m, "embedding.weight", sizes.vocabulary, num_uses=2 if tied else 1)
        learned = shape.learned_positions
        self.positions = Parameter(m, "positions.weight", sizes.position_table) if learned else None
        self.of_blocks = [_made(m, _of_block(sizes)) for _ in range(shape.num_layers)]
        self.norm = _made(m, _of_norm(sizes, "norm"))
        self.head = self.embedding if tied else Parameter(m, "head.weight", sizes.vocabulary)
        self.tables = [self.embedding, *([self.positions] if self.positions else [])]
        blocks = [parameter for block in self.of_blocks for parameter in block.values()]
        self.all = [*self.tables, *blocks, *self.norm.values(), *([] if tied else [self.head])]
        of_linear = [p for block in self.of_blocks for name, p in block.items() if "norm" not in name]
        self.linear = [*of_linear, *([] if tied else [self.head])]
        self._rotary = None if learned else m.new(sizes.rotary, FP32, "rotary table", category="parameters")


def _made(m: Machine, sizes: dict[str, Count]) -> Named:
    return {name: Parameter(m, name, count) for name, count in sizes.items()}


def _of_norm(sizes: Sizes, name: str) -> dict[str, Count]:
    found = {f"{name}.weight": sizes.width}
    return found | {f"{name}.bias": sizes.width} if sizes.shape.has_norm_biases else found


def _of_block(sizes: Sizes) -> dict[str, Count]:
    shape = sizes.shape
    *wide, last = shape.feed_forward_layers

    def linear(name: str, weight: Count, bias: Count, biased: bool = shape.biases == "all") -> dict[str, Count]:
        return {f"{name}.weight": weight} | ({f"{name}.bias": bias} if biased else {})

    found = _of_norm(sizes, "attention_norm")
    weights, biases = (sizes.projection, *[sizes.key_projection] * 2), (sizes.query_width, *[sizes.key_width] * 2)
    if shape.projections == "merged":
        found |= linear("query_key_value", together(*weights), together(*biases), shape.biases != "none")
    else:
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            found |= linear(name, weight, bias, shape.biases != "none")
    found |= linear("output", sizes.projection, sizes.width)
    found |= _of_norm(sizes, "feed_forward_norm")
    if shape.projections == "merged" and len(wide) > 1:
        found |= linear("gate_up", together(*[sizes.feed_forward] * 2), together(*[sizes.inner_width] * 2))
    else:
        for name in wide:
            found |= linear(name, sizes.feed_forward, sizes.inner_width)
    return found | linear(last, sizes.feed_forward, sizes.width)


class Transformer:
    def __init__(
        self,
        m: Machine,
        attend: Attend,
        checkpointing: str,
        head_loss: HeadLoss | None,
        block: "type[Block] | None" = None,
    ) -> None:
        """head_loss: computes output head and loss as one operator; None: separately. block: its class; None: Block."""
        self._machine, self._checkpointing, self._head_loss = m, checkpointing, head_loss
        self.parameters = Parameters(m)
        self._kind = block or Block
        self._blocks = [self._kind(m, attend, parameters) for parameters in self.parameters.of_blocks]

    def forward(self) -> Tensor:
        m = self._machine
        m.where = "embedding"
        x = self._kind.entered(m, self._embedded())
        for index, block in enumerate(self._blocks):
            m.where = f"block {index}"
            if self._checkpointing in SELECTIVE or is_recomputed(self._checkpointing, index):
                x = m.checkpoint(block.forward, x, self._checkpointing)
            else:
                x = block.forward(x)
        m.where = "head and loss"
        norm, head = self.parameters.norm, self.parameters.head
        if self._head_loss is not None:
            return self._head_loss(m, self._kind.last_norm(m, x, norm), head)
        logits = linear(m, gather(m, self._kind.last_norm(m, x, norm)), head, m.sizes.logits, "logits")
        return cross_entropy(m, logits)

    def _embedded(self) -> Tensor:
        x = scatter(self._machine, embedding(self._machine, self.parameters.embedding))
        if self.parameters.positions is None:
            return x
        return add_positions(self._machine, x, learned_positions(self._machine, self.parameters.positions))

    def backward(self, loss: Tensor) -> None:
        m = self._machine
        assert loss.slot is not None
        ones = m.new(m.sizes.one, loss.dtype, "gradient of the loss")  # held until the backward pass is over
        m.ran("fill", (), (ones,))
        loss.slot.gradient = ones
        run_backward(m)


def normalised(m: Machine, x: Tensor, parameters: Named, name: str, what: str) -> Tensor:
    weight = parameters[f"{name}.weight"]
    if m.sizes.shape.norm == "layernorm":
        return layer_norm(m, x, weight, parameters.get(f"{name}.bias"), what)
    return rms_norm(m, x, weight, what)


class Block:
    _amax_known: ClassVar[Mapping[str, tuple[bool, bool]]] = {}
    """By linear layer, for fp8: True if the largest magnitude is known before the cast, for (input, output's gradient).
    """

    def __init__(self, m: Machine, attend: Attend, parameters: Named) -> None:
        self._machine, self._attend, self._parameters = m, attend, parameters

    def forward(self, x: Any) -> Any:
        m, parameters = self._machine, self._parameters
        x = add(m, x, self._attention(gather(m, normalised(m, x, parameters, "attention_norm", "attention norm"))))
        return add(
            m, x, self._feed_forward(gather(m, normalised(m, x, parameters, "feed_forward_norm", "feed-forward norm")))
        )

    @staticmethod
    def entered(m: Machine, x: Tensor) -> Any:
        return x

    @staticmethod
    def last_norm(m: Machine, x: Any, norm: Named) -> Tensor:
        return normalised(m, x, norm, "norm", "final norm")

    def _linear(self, name: str, x: Tensor, out: Count, what: str) -> Tensor:
        weight, bias = self._parameters[f"{name}.weight"], self._parameters.get(f"{name}.bias")
        if self._machine.takes_fp8:
            return fp8_linear(self._machine, x, weight, out, what, bias, self._amax_known.get(name, (False, False)))
        return linear(self._machine, x, weight, out, what, bias)

    def _attention(self, x: Tensor) -> Tensor:
        m = self._machine
        q, k, v = (split_heads(m, projected) for projected in self._projected(x))
        o = self._attend(m, rotate(m, q, "query"), rotate(m, k, "key"), v)
        return scatter(m, self._linear("output", merge_heads(m, o), m.sizes.gathered, "attention branch"))

    def _projected(self, x: Tensor) -> Iterable[Tensor]:
        m, sizes = self._machine, self._machine.sizes
        widths = sizes.residual, sizes.keys, sizes.keys
        if sizes.shape.projections == "merged":
            return columns(m, self._linear("query_key_value", x, together(*widths), "query, key and value"), *widths)
        return (self._linear(name, x, out, name) for name, out in zip(("query", "key", "value"), widths, strict=True))

    def _feed_forward(self, x: Tensor) -> Tensor:
        m, inner, whole = self._machine, self._machine.sizes.inner, self._machine.sizes.gathered

        # Nested as in the model, where no variable holds the factors.
        if m.sizes.shape.feed_forward == "gelu":
            product = activation(m, "gelu", self._linear("up", x, inner, "up"), "gelu of up")
        elif m.sizes.shape.projections == "merged":
            gate, up = columns(m, self._linear("gate_up", x, together(inner, inner), "gate and up"), inner, inner)
            product = multiply(m, activation(m, "silu", gate, "silu of the gate"), up, "gated product")
        else:
            product = multiply(
                m,
                activation(m, "silu", self._linear("gate", x, inner, "gate"), "silu of the gate"),
                self._linear("up", x, inner, "up"),
                "gated product",
            )
        return scatter(m, self._linear("down", product, whole, "feed-forward branch"))


Stream = tuple[Tensor, Tensor]
"""(x, branch): the residual stream is their sum."""


class FusedBlock(Block):
    _amax_known: ClassVar = {"query_key_value": (True, True), "gate_up": (True, True), "down": (True, False)}

    def forward(self, stream: Stream) -> Stream:
        m, parameters = self._machine, self._parameters
        normed, x = add_rms_norm(m, *stream, parameters["attention_norm.weight"], "attention norm")
        normed, x = add_rms_norm(
            m, x, self._attention(normed), parameters["feed_forward_norm.weight"], "feed-forward norm"
        )
        return x, self._feed_forward(normed)

    @staticmethod
    def entered(m: Machine, x: Tensor) -> Stream:
        zeros = m.new(x.count, m.autocast or x.dtype, "branch before the first block")
        m.ran("fill", (), (zeros,))
        return x, zeros

    @staticmethod
    def last_norm(m: Machine, x: Stream, norm: Named) -> Tensor:
        return add_rms_norm(m, *x, norm["norm.weight"], "final norm", reads_sum=False)[0]

    def _attention(self, x: Tensor) -> Tensor:
        m, sizes = self._machine, self._machine.sizes
        whole = together(sizes.residual, sizes.keys, sizes.keys)
        q, k, v = rotary_heads(m, self._linear("query_key_value", x, whole, "query, key and value"))
        o = self._attend(m, q, k, v)
        return self._linear("output", merge_heads(m, o), m.sizes.gathered, "attention branch")

    def _feed_forward(self, x: Tensor) -> Tensor:
        m, inner = self._machine, self._machine.sizes.inner
        product = swiglu(m, self._linear("gate_up", x, together(inner, inner), "gate and up"))
        return self._linear("down", product, m.sizes.gathered, "feed-forward branch")


def add_rms_norm(
    m: Machine, x: Tensor, branch: Tensor, weight: Parameter, what: str, *, reads_sum: bool = True
) -> Stream:
    """The norm of x + branch, and the sum. Saves the sum and one number a token.

    reads_sum: True if anything reads the sum, which then has a gradient too.
    """
    wide = x.dtype if x.dtype.num_bytes >= branch.dtype.num_bytes else branch.dtype
    of_x, of_branch, named = (x.count, x.dtype), (branch.count, branch.dtype), x.what
    normed, total = m.new(x.count, m.autocast or x.dtype, what), m.new(x.count, wide, "residual stream")
    reciprocal = m.new(m.sizes.rows_of_stream, FP32, "reciprocal root mean squares")
    m.ran("add_rms_norm", (x, branch, weight.tensor), (normed, total, reciprocal))

    def backward(m: Machine, kept: tuple[Tensor, ...], *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = [m.new(*of_x, f"gradient of {named}")]
        if of_branch != of_x:
            made.append(m.new(*of_branch, f"gradient of {named}, in {of_branch[1].name}"))
        of_weight = m.new(weight.tensor.count, weight.tensor.dtype, f"gradient of {weight.name}")
        programs, width = min(m.sizes.tokens.value, NUM_PROGRAMS), weight.tensor.count
        shares = m.new(Count(programs * width.value, f"{programs} {width.symbols}"), FP32, f"parts of {weight.name}'s")
        m.ran("add_rms_norm_backward", (*gradients, *kept, weight.tensor), (*made, shares))
        m.ran("sum", (shares,), (of_weight,))
        return made[0], made[-1], of_weight

    node = m.node((x.slot, branch.slot, weight.slot), (total, reciprocal), backward)
    node.gives(*((normed, total) if reads_sum else (normed,)))
    return normed, total


def rotary_heads(m: Machine, merged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, the first two rotated, each in the layout of [B, T, d]. Saves only the table."""
    like, sizes = (merged.count, merged.dtype, f"gradient of {merged.what}"), m.sizes
    table_bytes = sizes.rotary.value * FP32.num_bytes
    q, k, v = (
        m.new(count, merged.dtype, what)
        for count, what in ((sizes.residual, "rotated query"), (sizes.keys, "rotated key"), (sizes.keys, "value"))
    )
    for part in (q, k, v):
        part.heads_together = True
    m.ran("rotary_heads", (merged,), (q, k, v), also_read_bytes=table_bytes)

    def backward(m: Machine, kept: tuple[Tensor, ...], *gradients: Tensor) -> tuple[Tensor]:
        made = m.new(*like)
        m.ran("rotary_heads_backward", gradients, (made,), also_read_bytes=table_bytes)
        return (made,)

    m.node((merged.slot,), (), backward).gives(q, k, v)
    return q, k, v


def swiglu(m: Machine, gate_up: Tensor) -> Tensor:
    """silu(gate) times up. Saves both."""
    product = m.run("swiglu", (gate_up,), m.sizes.inner, gate_up.dtype, "gated product")
    return m.made_from(gate_up, product, "swiglu_backward", (gate_up,))
