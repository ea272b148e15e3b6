"""Tensor parallelism in the dry run: tokens are gathered before the first products, and sums scattered after the last.

DTensor does both (torch/distributed/tensor/_collective_utils.py). A received all-gather is ordered by rank and is
copied into the order of the tokens; a reduce-scatter is copied into the order of the ranks before it is sent.
"""

from steplab.plan.dry_run.machine import Machine
from steplab.plan.dry_run.tensors import Tensor


def gather(m: Machine, x: Tensor) -> Tensor:
    """All tokens of a tensor that is split over the ranks; backward sums and scatters the gradient. Where each rank has
    all tokens, that sum is in place."""
    if not m.sizes.split_tokens:
        return x
    whole = _gathered(m, x)
    m.node((x.slot,), (), lambda m, kept, gradient: (_scattered(m, gradient),)).gives(whole)
    return whole


def scatter(m: Machine, x: Tensor) -> Tensor:
    """A rank's tokens of the sum over all ranks, or all of them in place; backward gathers the gradient."""
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
