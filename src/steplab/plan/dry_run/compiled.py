"""Estimates the model's memory under torch.compile; the rest of the dry run is exact.

The lists below are what torch 2.13's min-cut partitioner saves of the plain Transformer: results and inputs of matmuls,
each once, and only the input of a checkpointed block. Elementwise operators are recomputed. The fused kernels between
need little memory and are not followed.
"""

from dataclasses import dataclass

from steplab.ops.attention.implementations import implementation
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.sizes import BOOL, FP8, FP32, Count, Dtype
from steplab.plan.dry_run.tape import run_backward
from steplab.plan.dry_run.tensors import Slot, Tensor
from steplab.plan.dry_run.transformer import HeadLoss, Parameters
from steplab.specs.checkpointing import SELECTIVE, is_recomputed
from steplab.specs.step import StepSpec


@dataclass(frozen=True, slots=True)
class _Kind:
    count: Count
    dtype: Dtype
    what: str
    number: int = 1
    category: str = "temporaries"


def _num_bytes(kinds: list[_Kind]) -> int:
    return sum(kind.number * kind.count.value * kind.dtype.num_bytes for kind in kinds)


class CompiledTransformer:
    def __init__(self, m: Machine, spec: StepSpec, head_loss: HeadLoss | None) -> None:
        """head_loss: computes output head and loss as one operator; None: separately."""
        self._machine, self._spec, self._head_loss = m, spec, head_loss
        self._normed: Slot | None = None
        self._fused = spec.block_ops == "triton"
        self.parameters = Parameters(m)
        self._kept: list[list[Tensor]] = []
        self._left: list[tuple[Parameter, Tensor]] = []
        """Weight gradients, which the compiled backward pass returns at its end."""

    def forward(self) -> Tensor:
        """Allocate the tensors that forward saves, and return the loss; without a backward pass, only temporaries."""
        m = self._machine
        m.start_products()
        for index in range(m.sizes.shape.num_layers):
            m.where = f"block {index}"
            if m.tape is None:
                self._made(self._of_inference())
            else:
                self._kept.append(self._made(self._of_block(checkpointed=self._is_checkpointed(index))))
        m.where = "head and loss"
        if self._head_loss is not None:
            return self._head_and_loss(self._head_loss)
        head = self._made(self._of_head())
        if m.tape is not None:
            self._kept.append(head)
        return m.new(m.sizes.one, m.weight_dtype, "loss")

    def backward(self, loss: Tensor) -> None:
        """Allocate the gradients of all parameters, and free saved tensors block by block.

        Activations' gradients overwrite saved tensors where possible. A block's saved tensors are freed before its
        weight gradients are cast.
        """
        m = self._machine
        m.start_products()
        m.where = "head and loss"
        gradient = self._gradient_of_head(loss)
        self._kept.pop()
        tied = m.sizes.shape.head == "tied"
        made_already = tied or self._head_loss is not None
        self._leave_gradients([*self.parameters.norm.values(), *([] if made_already else [self.parameters.head])])
        gradient = m.new(m.sizes.stream, m.weight_dtype, "gradient of the residual stream")
        for index, parameters in reversed(list(enumerate(self.parameters.of_blocks))):
            m.where = f"block {index}"
            if self._is_checkpointed(index):
                self._made(self._of_block())  # recomputed, and freed again
            self._kept.pop()
            self._leave_gradients(list(parameters.values()))
        m.where = "embedding"
        self._leave_gradients(self.parameters.tables)
        del gradient
        for parameter, made in self._left:
            if parameter.slot.gradient is None:
                parameter.slot.gradient = made  # else it is added to the existing gradient in place
        self._left.clear()

    def _head_and_loss(self, head_loss: HeadLoss) -> Tensor:
        m = self._machine
        x = m.new(m.sizes.stream, m.weight_dtype, "final norm")
        x.slot = self._normed = Slot(x.dtype)
        if m.tape is not None:
            self._kept.append(self._made([_Kind(m.sizes.stream, m.weight_dtype, "residual stream, normalised")]))
        return head_loss(m, x, self.parameters.head)

    def _gradient_of_head(self, loss: Tensor) -> Tensor:
        """The gradient of the head's input; a loss in chunks has computed it in forward already."""
        m = self._machine
        if self._head_loss is None:
            return m.new(m.sizes.stream, m.product_dtype, "gradient of the residual stream")
        assert loss.slot is not None
        assert self._normed is not None
        loss.slot.gradient = m.new(m.sizes.one, loss.dtype, "gradient of the loss")
        run_backward(m)
        return self._normed.take()

    def _is_checkpointed(self, index: int) -> bool:
        return self._spec.checkpointing in SELECTIVE or is_recomputed(self._spec.checkpointing, index)

    def _made(self, kinds: list[_Kind]) -> list[Tensor]:
        m = self._machine
        return [m.new(kind.count, kind.dtype, kind.what, kind.category) for kind in kinds for _ in range(kind.number)]

    def _leave_gradients(self, parameters: list[Parameter]) -> None:
        for parameter in parameters:
            tensor, is_first = parameter.tensor, parameter.slot.gradient is None
            made = self._machine.new(
                tensor.count, tensor.dtype, f"gradient of {parameter.name}", "gradients" if is_first else "temporaries"
            )
            self._left.append((parameter, made))

    def _of_block(self, *, checkpointed: bool = False) -> list[_Kind]:
        m, sizes, compute = self._machine, self._machine.sizes, self._machine.product_dtype
        inner = sizes.shape.feed_forward_layers[:-1]
        in_memory = implementation(self._spec.attention).materialises_scores
        keys = sizes.residual if in_memory else sizes.keys
        operand = FP8 if m.takes_fp8 else compute
        if checkpointed:
            kept = [_Kind(sizes.stream, m.weight_dtype, "residual stream")]
            if self._fused:
                kept.append(_Kind(sizes.stream, compute, "branch of the block before"))
            if self._spec.checkpointing in SELECTIVE:
                others, of_keys = 3, 2
                if self._spec.checkpointing == "selective_2":  # neither attention's branch, nor separate keys and up
                    merged, others = sizes.shape.projections == "merged", 2
                    of_keys, inner = (2, inner) if merged else (1, inner[:1])
                kept += [
                    *self._attended(sizes.keys, "outputs of the attention's matmuls", others, of_keys),
                    _Kind(sizes.inner, compute, " and ".join(inner), len(inner)),
                    *([_Kind(sizes.scores, compute, "attention scores")] if in_memory else [self._row_sums()]),
                ]
            return kept
        kept = [
            *self._of_streams(),
            _Kind(sizes.rows_of_stream, FP32, "reciprocal root mean squares", 2),
            _Kind(sizes.gathered, operand, "norms", 2),
            *self._attended(keys, "query, key, value", num_others=1),
            *self._around_values(in_memory),
            _Kind(sizes.residual, compute, "attention output"),
            _Kind(sizes.inner, compute, self._inner_words, len(inner) + (not m.takes_fp8)),
            *(self._in_fp8() if m.takes_fp8 else []),
            *(self._of_scores() if in_memory else self._of_fused_attention()),
        ]
        projections, feed_forward = self._cast_weights()
        return [*kept, *projections, *feed_forward]

    def _in_fp8(self) -> list[_Kind]:
        """Tensors that fp8 matmuls save: the product of gate and up, and casts by columns of attention's output and of
        all weights.
        """
        sizes = self._machine.sizes
        of_block = self.parameters.of_blocks[0].items()
        weights = [each.tensor for name, each in of_block if name.endswith(".weight") and "norm" not in name]
        return [
            _Kind(sizes.inner, FP8, f"{self._inner_words}, in fp8"),
            _Kind(sizes.residual, FP8, "attention output, in fp8 by columns"),
            *(_Kind(each.count, FP8, f"{each.what}, in fp8 by columns") for each in weights),
        ]

    def _of_streams(self) -> list[_Kind]:
        """Saved inputs of a block's two norms.

        A block compiled alone saves attention's branch instead of the second input, and recomputes their sum.
        """
        m, sizes, what = self._machine, self._machine.sizes, "residual stream, normalised"
        if self._spec.compile != "block" or self._fused:
            return [_Kind(sizes.stream, m.weight_dtype, what, 2)]
        return [_Kind(sizes.stream, m.weight_dtype, what), _Kind(sizes.stream, m.product_dtype, "attention's branch")]

    def _attended(self, keys: Count, what: str, num_others: int, num_keys: int = 2) -> list[_Kind]:
        sizes, compute = self._machine.sizes, self._machine.product_dtype
        if keys is sizes.residual:
            return [_Kind(keys, compute, what, num_keys + num_others)]
        return [_Kind(sizes.residual, compute, what, num_others), _Kind(keys, compute, "keys and values", num_keys)]

    def _around_values(self, in_memory: bool) -> list[_Kind]:
        """Queries and keys before rotation, saved because the values are a view of the same merged projection."""
        sizes, compute = self._machine.sizes, self._machine.product_dtype
        if sizes.shape.projections == "separate" or in_memory or sizes.shape.learned_positions or self._fused:
            return []
        return [_Kind(count, compute, "queries and keys, not rotated") for count in (sizes.residual, sizes.keys)]

    @property
    def _inner_words(self) -> str:
        swiglu = self._machine.sizes.shape.feed_forward == "swiglu"
        return "gate, up and their product" if swiglu else "up and gelu of it"

    def _is_cast(self, parameter: Parameter) -> bool:
        return parameter.tensor.dtype is not self._machine.autocast

    def _cast_weights(self) -> tuple[list[_Kind], list[_Kind]]:
        """Autocast's copies of a block's weights: of attention, and of the feed-forward part."""
        sizes, dtype = self._machine.sizes, self._machine.autocast
        if dtype is None or not self._is_cast(self.parameters.linear[0]):
            return [], []
        alike = sizes.key_projection is sizes.projection
        numbers = [(sizes.projection, 4)] if alike else [(sizes.projection, 2), (sizes.key_projection, 2)]
        counted = [*numbers, (sizes.feed_forward, len(sizes.shape.feed_forward_layers))]
        made = [
            _Kind(count, dtype, f"weights, in {dtype.name}", number, "autocast_copies") for count, number in counted
        ]
        return made[:-1], made[-1:]

    def _of_inference(self) -> list[_Kind]:
        """A block's peak memory without gradients: in its feed-forward half, or around the scores."""
        m, sizes, compute = self._machine, self._machine.sizes, self._machine.product_dtype
        stream = [_Kind(sizes.stream, m.weight_dtype, "residual stream"), _Kind(sizes.stream, compute, "norms")]
        in_memory = implementation(self._spec.attention).materialises_scores
        keys = sizes.residual if in_memory else sizes.keys
        attention = self._attended(keys, "query, key, value", num_others=1)
        if in_memory:
            attention.append(_Kind(sizes.scores, compute, "attention scores and weights", 2))
        feed_forward = [_Kind(sizes.inner, compute, self._inner_words, len(sizes.shape.feed_forward_layers))]
        cast_projections, cast_feed_forward = self._cast_weights()
        return stream + max(attention + cast_projections, feed_forward + cast_feed_forward, key=_num_bytes)

    def _of_scores(self) -> list[_Kind]:
        m, sizes = self._machine, self._machine.sizes
        kept = [_Kind(sizes.scores, m.product_dtype, "attention weights"), _Kind(sizes.square, BOOL, "causal mask")]
        if m.autocast is not None:
            kept.append(_Kind(sizes.scores, m.product_dtype, "attention scores, masked"))
            kept.append(_Kind(sizes.rows, FP32, "maximum and sum of each row of scores", 2))
        return kept

    def _of_fused_attention(self) -> list[_Kind]:
        # Queries that are not rotated, or are rotated by steplab's kernel, have their heads together.
        if self._machine.sizes.shape.learned_positions or self._fused:
            return [self._row_sums()]
        copy = _Kind(self._machine.sizes.residual, self._machine.product_dtype, "attention output, heads together")
        return [copy, self._row_sums()]

    def _row_sums(self) -> _Kind:
        return _Kind(self._machine.sizes.rows, FP32, "log of the sum of each row of scores")

    def _of_head(self) -> list[_Kind]:
        m, sizes = self._machine, self._machine.sizes
        kept = [_Kind(sizes.gathered, m.product_dtype, "norms"), _Kind(sizes.logits, m.product_dtype, "logits")]
        if m.tape is not None:
            kept.append(_Kind(sizes.stream, m.weight_dtype, "residual stream, normalised"))
        if m.autocast is not None and self._is_cast(self.parameters.head):
            copy = f"weights, in {m.autocast.name}"
            kept.append(_Kind(sizes.vocabulary, m.autocast, copy, category="autocast_copies"))
        return kept
