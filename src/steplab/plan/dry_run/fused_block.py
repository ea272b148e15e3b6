"""model/fused_block.py in the dry run's operators, with ops/rms_norm, rotary_heads and swiglu."""

from typing import ClassVar

from steplab.ops.triton_places import NUM_PROGRAMS
from steplab.plan.dry_run.attention import merge_heads
from steplab.plan.dry_run.machine import Machine, Parameter
from steplab.plan.dry_run.sizes import FP32, Count, together
from steplab.plan.dry_run.tensors import Tensor
from steplab.plan.dry_run.transformer import Block, Named

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
    """The norm of the sum, and the sum. Keeps the sum and one number a row. reads_sum: True if anything reads the sum,
    which then has a gradient too."""
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
    """Queries, keys and values, the first two rotated, each with its heads together. Keeps only the table."""
    like, sizes = (merged.count, merged.dtype, f"gradient of {merged.what}"), m.sizes
    table_bytes = sizes.rotary.value * FP32.num_bytes
    q, k, v = (
        m.new(count, merged.dtype, what)
        for count, what in (
            (sizes.residual, "rotated query"),
            (sizes.keys, "rotated key"),
            (sizes.keys, "value"),
        )
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
    """silu(gate) times up. Keeps both."""
    like = (gate_up.count, gate_up.dtype, f"gradient of {gate_up.what}")

    def backward(m: Machine, kept: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor]:
        return (m.run("swiglu_backward", (gradient, *kept), *like),)

    product = m.run("swiglu", (gate_up,), m.sizes.inner, gate_up.dtype, "gated product")
    m.node((gate_up.slot,), (gate_up,), backward).gives(product)
    return product
