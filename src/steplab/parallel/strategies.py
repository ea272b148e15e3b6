"""When gradients are reduced, and how many at a time."""

from dataclasses import dataclass

from steplab.errors import UserError

BYTES_PER_MB = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """The difference between the ways of synchronising gradients; all other code is shared."""

    name: str
    """The name that users give."""
    bucket_bytes: float
    """The size that a bucket must not exceed by another gradient; 0 puts each gradient into its own bucket."""
    during_backward: bool
    """Whether a bucket is launched as soon as its gradients are ready, or after backward."""
    one_at_a_time: bool
    """Whether each collective is waited for before the next is launched."""


def strategy_of(name: str, bucket_size_mb: float) -> Strategy:
    """The strategy of that name; the size, in MB of 1e6 bytes, affects `bucketed` only.

    Raises UserError for an unknown name, and for a size that is not positive.
    """
    if not bucket_size_mb > 0:
        raise UserError(f"a bucket of {bucket_size_mb} MB holds nothing: give a positive bucket_size_mb")
    strategies = {
        "naive": Strategy(name="naive", bucket_bytes=0, during_backward=False, one_at_a_time=True),
        "flat": Strategy(name="flat", bucket_bytes=float("inf"), during_backward=False, one_at_a_time=False),
        "overlap": Strategy(name="overlap", bucket_bytes=0, during_backward=True, one_at_a_time=False),
        "bucketed": Strategy(
            name="bucketed", bucket_bytes=bucket_size_mb * BYTES_PER_MB, during_backward=True, one_at_a_time=False
        ),
    }
    if name not in strategies:
        raise UserError(f"there is no strategy {name!r}: choose {', '.join(strategies)}")
    return strategies[name]
