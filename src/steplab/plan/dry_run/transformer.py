"""model/transformer.py in the operators of the dry run, line by line."""

from steplab.plan.dry_run.attention import Attend, merge_heads, rotate, split_heads
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.operators import add, cross_entropy, embedding, linear, multiply, rms_norm, silu
from steplab.plan.dry_run.sizes import FP32
from steplab.plan.dry_run.tensors import Tensor
from steplab.specs.checkpointing import is_recomputed


class Parameters:
    """The weights, made in the order in which the model makes them, and the rotary table."""

    def __init__(self, m: Machine) -> None:
        sizes = m.sizes
        attention = [(f"{name}.weight", sizes.projection) for name in ("query", "key", "value", "output")]
        feed_forward = [(f"{name}.weight", sizes.feed_forward) for name in ("gate", "up", "down")]
        norm = ("feed_forward_norm.weight", sizes.width)
        block = [("attention_norm.weight", sizes.width), *attention, norm, *feed_forward]
        self.of_embedding = [Parameter(m, "embedding.weight", sizes.vocabulary)]
        self.of_blocks = [[Parameter(m, *which) for which in block] for _ in range(sizes.shape.num_layers)]
        self.of_head = [Parameter(m, "norm.weight", sizes.width), Parameter(m, "head.weight", sizes.vocabulary)]
        self.all = [p for part in (self.of_embedding, *self.of_blocks, self.of_head) for p in part]
        """In that order."""
        self._rotary = m.new(sizes.rotary, FP32, "rotary table", category="parameters")


class Transformer:
    """The model on one machine."""

    def __init__(self, m: Machine, attend: Attend, checkpointing: str) -> None:
        self._machine, self._checkpointing = m, checkpointing
        self.parameters = Parameters(m)
        self._blocks = [Block(m, attend, parameters) for parameters in self.parameters.of_blocks]

    def forward(self) -> Tensor:
        """The loss of one batch."""
        m = self._machine
        m.where = "embedding"
        x = embedding(m, *self.parameters.of_embedding)
        for index, block in enumerate(self._blocks):
            m.where = f"block {index}"
            if self._checkpointing == "selective" or is_recomputed(self._checkpointing, index):
                x = m.checkpoint(block.forward, x, selective=self._checkpointing == "selective")
            else:
                x = block.forward(x)
        m.where = "head and loss"
        norm, head = self.parameters.of_head
        logits = linear(m, rms_norm(m, x, norm, "final norm"), head, m.sizes.logits, "logits")
        return cross_entropy(m, logits)

    def backward(self, loss: Tensor) -> None:
        """The gradients of all parameters."""
        m = self._machine
        assert m.tape is not None
        assert loss.slot is not None
        ones = m.new(m.sizes.one, loss.dtype, "gradient of the loss")  # held until the backward pass is over
        m.ran("fill", (), (ones,))
        loss.slot.gradient = ones
        m.tape.run_backward(m)


class Block:
    """Attention, then feed-forward."""

    def __init__(self, m: Machine, attend: Attend, parameters: list[Parameter]) -> None:
        self._machine, self._attend = m, attend
        self._attention_norm, *self._projections, self._output = parameters[:5]
        self._feed_forward_norm, self._gate, self._up, self._down = parameters[5:]

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the block."""
        m = self._machine
        x = add(m, x, self._attention(rms_norm(m, x, self._attention_norm, "attention norm")))
        return add(m, x, self._feed_forward(rms_norm(m, x, self._feed_forward_norm, "feed-forward norm")))

    def _attention(self, x: Tensor) -> Tensor:
        m, residual = self._machine, self._machine.sizes.residual
        q, k, v = (
            split_heads(m, linear(m, x, weight, residual, what))
            for weight, what in zip(self._projections, ("query", "key", "value"), strict=True)
        )
        o = self._attend(m, rotate(m, q, "query"), rotate(m, k, "key"), v)
        return linear(m, merge_heads(m, o), self._output, residual, "attention branch")

    def _feed_forward(self, x: Tensor) -> Tensor:
        m, inner = self._machine, self._machine.sizes.inner

        # Nested as in the model, where the factors have no names that would hold them.
        product = multiply(
            m, silu(m, linear(m, x, self._gate, inner, "gate")), linear(m, x, self._up, inner, "up"), "gated product"
        )
        return linear(m, product, self._down, m.sizes.residual, "feed-forward branch")
