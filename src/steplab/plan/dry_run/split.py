"""Tensor parallelism in the dry run: tokens of all ranks gathered before the first products, sums scattered after the
last ones, as DTensor does both (torch/distributed/tensor/_collective_utils.py).

What an all-gather receives lies rank by rank, and is copied into the order of the tokens; what a reduce-scatter sends
is copied into the order of the ranks first.
"""

from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.tensors import Tensor


def gather(m: Machine, x: Tensor) -> Tensor:
    """All tokens, of a tensor of which each rank has some; backward the gradient is summed and scattered. Where each
    rank has all of them, that sum is in place."""
    if not m.sizes.split_tokens:
        return x
    whole = _gathered(m, x)
    m.node((x.slot,), (), lambda m, kept, gradient: (_scattered(m, gradient),)).gives(whole)
    return whole


def scatter(m: Machine, x: Tensor) -> Tensor:
    """Some tokens of the sum over all ranks, or in place all of them; backward the gradient is gathered."""
    if not m.sizes.split_tokens:
        return x
    part = _scattered(m, x)
    m.node((x.slot,), (), lambda m, kept, gradient: (_gathered(m, gradient),)).gives(part)
    return part


def _gathered(m: Machine, x: Tensor) -> Tensor:
    received = m.new(m.sizes.gathered, x.dtype, f"{x.what}, received", category="temporaries")
    return m.run("cat", (received,), m.sizes.gathered, x.dtype, f"{x.what}, of all ranks")


def _scattered(m: Machine, x: Tensor) -> Tensor:
    to_send = m.run("cat", (x,), m.sizes.gathered, x.dtype, f"{x.what}, to send")
    return m.new(m.sizes.stream, to_send.dtype, f"{x.what}, summed over ranks")
