"""How ranks share weights, gradients and the optimizer's state."""

from dataclasses import dataclass

from steplab.plan.dry_run.machine import Gathering
from steplab.plan.layout.buckets import Buckets, buckets_of
from steplab.plan.layout.model import SpreadModel, own_model
from steplab.plan.layout.owned import Owned, owned_of
from steplab.specs.ddp import Variant
from steplab.specs.step import StepSpec

_FP32_BYTES = 4
GATHERING = Gathering()
"""FSDP2's gathering of weights as measurement.step.distribute sets it up, with a current torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    kind: str
    """Kind of data parallelism: one of specs.ddp.Kind, or 'none' without data-parallel ranks."""
    fsdp: int
    replicas: int
    reshard: bool
    """True if weights that FSDP2 gathered are freed after the forward pass."""
    weight_bytes: int
    """Bytes per element of a stored weight."""
    gathered_bytes: int
    """Bytes per element of a weight as FSDP2 gathers it."""
    splits_tokens: bool
    """True if tensor parallelism also splits the tokens (sequence parallelism), as in steplab's own model."""
    model: SpreadModel
    gathering: Gathering | None
    buckets: Buckets | None
    owned: Owned | None
    """Rank 0's memory if each weight has an owner (`sharded`); None: another kind."""
    by_peer_copies: bool
    """True if ranks copy gradients into each other's memory, without collectives."""

    @property
    def gathers(self) -> bool:
        return self.gathering is not None

    @property
    def reduced_bytes(self) -> int:
        """Bytes per gradient element as FSDP2 reduces it: fp32 if weights are gathered in another format."""
        return self.weight_bytes if self.gathered_bytes == self.weight_bytes else _FP32_BYTES


def weight_bytes(spec: StepSpec) -> int:
    return 2 if spec.precision == "bf16_pure" else _FP32_BYTES


def stage_bytes(spec: StepSpec, sharing: Sharing) -> int:
    """Bytes of a microbatch's residual stream, as a stage of a pipeline sends it to the next."""
    size = weight_bytes(spec) * spec.tokens // spec.num_microbatches * sharing.model.width
    return size // (spec.layout.tp if sharing.splits_tokens else 1)


def sharing_of(
    spec: StepSpec,
    variant: Variant | None = None,
    gathering: Gathering = GATHERING,
    *,
    sequence_parallel: bool = True,
    model: SpreadModel | None = None,
) -> Sharing:
    """Return how the ranks of the spec's layout share weights, gradients and optimizer state.

    Args:
        variant: a data-parallel study's, with all ranks along dp; None: as in the spec.
        model: None: steplab's own; FSDP2 gathers any other in its stored format.
    """
    layout, model = spec.layout, model or own_model(spec)
    kind = variant.kind if variant else spec.strategy or ("fsdp2" if layout.data_ranks > 1 else "none")
    width = weight_bytes(spec)
    size_mb = variant.bucket_size_mb if variant else spec.bucket_size_mb
    peers = variant is not None and variant.transport == "peer_copy"
    owned, buckets = None, None
    if kind == "sharded":
        owned = owned_of(_elements(model), size_mb or 0.0, width, layout.dp, by_peer_copies=peers)
        buckets = owned.buckets
    elif kind not in ("none", "fsdp2"):
        buckets = buckets_of(_elements(model), kind, size_mb or 0.0, width, peers=layout.dp if peers else 0)
    return Sharing(
        kind=kind,
        fsdp=(layout.dp if variant else layout.fsdp) if kind == "fsdp2" else 1,
        replicas=layout.dp if kind == "fsdp2" and variant is None else 1,
        reshard=spec.reshards,
        weight_bytes=width,
        gathered_bytes=2 if spec.precision == "bf16" and gathering.low_precision and model.is_own else width,
        splits_tokens=sequence_parallel and model.is_own,
        model=model,
        gathering=gathering if kind == "fsdp2" else None,
        buckets=buckets,
        owned=owned,
        by_peer_copies=peers,
    )


def _elements(model: SpreadModel) -> tuple[int, ...]:
    blocks = model.weights("block", 1) * model.num_layers
    every = (*model.weights("embedding", 1), *blocks, *model.weights("head", 1))
    return tuple(weight.elements for weight in every if weight.trained)
