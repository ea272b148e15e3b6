"""model/transformer.py in the operators of the dry run, line by line."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from steplab.plan.dry_run.attention import Attend, merge_heads, rotate, split_heads
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.operators import (
    add,
    add_positions,
    columns,
    cross_entropy,
    embedding,
    fp8_linear,
    gelu,
    layer_norm,
    learned_positions,
    linear,
    multiply,
    rms_norm,
    silu,
)
from steplab.plan.dry_run.sizes import FP32, Count, Sizes, together
from steplab.plan.dry_run.split import gather, scatter
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
        """head_loss: the output head and the loss as one operator; None: separate. block: its class; None: Block."""
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
        assert m.tape is not None
        assert loss.slot is not None
        ones = m.new(m.sizes.one, loss.dtype, "gradient of the loss")  # held until the backward pass is over
        m.ran("fill", (), (ones,))
        loss.slot.gradient = ones
        m.tape.run_backward(m)


def normalised(m: Machine, x: Tensor, parameters: Named, name: str, what: str) -> Tensor:
    weight = parameters[f"{name}.weight"]
    if m.sizes.shape.norm == "layernorm":
        return layer_norm(m, x, weight, parameters.get(f"{name}.bias"), what)
    return rms_norm(m, x, weight, what)


class Block:
    _amax_known: ClassVar[Mapping[str, tuple[bool, bool]]] = {}
    """Linear layers: (True if the input, True if the output's gradient) comes with its largest magnitude."""

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
        """The residual stream in the form that the first block takes."""
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
            raised = gelu(m, self._linear("up", x, inner, "up"))
            return scatter(m, self._linear("down", raised, whole, "feed-forward branch"))
        if m.sizes.shape.projections == "merged":
            gate, up = columns(m, self._linear("gate_up", x, together(inner, inner), "gate and up"), inner, inner)
            product = multiply(m, silu(m, gate), up, "gated product")
            return scatter(m, self._linear("down", product, whole, "feed-forward branch"))
        product = multiply(
            m, silu(m, self._linear("gate", x, inner, "gate")), self._linear("up", x, inner, "up"), "gated product"
        )
        return scatter(m, self._linear("down", product, whole, "feed-forward branch"))
