from collections.abc import Sequence

from steplab.plan.cards import fits_of, outside_bytes, safe_device_bytes
from steplab.plan.layout.memory import memory_by_rank
from steplab.plan.layout.model import SpreadModel
from steplab.plan.layout.sharing import Sharing, sharing_of
from steplab.plan.terms import by_category
from steplab.records.prediction import MemoryPrediction
from steplab.specs.ddp import Variant
from steplab.specs.step import StepSpec
from steplab.units import format_bytes


def predict_layout_memory(
    spec: StepSpec,
    workspace_bytes: int,
    variant: Variant | None,
    notes: Sequence[str],
    model: SpreadModel | None = None,
) -> MemoryPrediction:
    """Predict the peak memory of the ranks that need most, with all others listed.

    A single process compiled block by block gets the same prediction, without NCCL.
    """
    sharing = sharing_of(spec, variant, model=model)
    ranks = memory_by_rank(spec, workspace_bytes, sharing)
    worst = max(ranks, key=lambda rank: (rank.peak_bytes, -rank.first_rank))
    outside, alone = outside_bytes(spec.layout), spec.layout.world_size == 1
    shared = sharing.owned.parameters_bytes if sharing.owned and sharing.by_peer_copies else 0
    shared += sharing.buckets.shared_bytes if sharing.buckets else 0
    of_ranks = [] if alone else _notes(spec, sharing, outside, shared)
    least = worst.peak_bytes + outside + shared
    safe = safe_device_bytes(worst.reserved_bytes, outside + shared, by_compiled_block=spec.compile != "off")
    return MemoryPrediction(
        peak_bytes=worst.peak_bytes,
        at_peak=by_category(worst.terms),
        peak_phase=worst.peak_phase,
        peak_where=worst.peak_where,
        terms=worst.terms,
        phase_peaks=worst.phase_peaks,
        notes=(*notes, *of_ranks),
        kind="estimate",
        reserved_bytes=worst.reserved_bytes,
        least_device_bytes=least,
        safe_device_bytes=safe,
        cards=fits_of(spec, "estimate", least, safe),
        rank="" if alone else worst.ranks,
        ranks=() if alone else ranks,
        model=sharing.model.facts,
        spec=spec,
    )


def _notes(spec: StepSpec, sharing: Sharing, outside: int, shared: int) -> list[str]:
    notes = [f"outside of the allocator: {format_bytes(outside)}, most of it NCCL's"]
    if shared:
        notes.append(f"peer copies share {format_bytes(shared)} between ranks, which torch's allocator does not count")
    if sharing.gathers and spec.precision == "bf16" and sharing.model.is_own:
        notes.append(
            "norms run as one kernel, as autocast has them from torch 2.12 on; an earlier torch keeps 8 B T d / tp "
            "bytes more in each block"
        )
    if sharing.kind == "torch_ddp" and sharing.buckets:
        notes.append(
            f"torch DDP rebuilds its buckets after the first step; until the old ones are freed it may hold "
            f"{format_bytes(sharing.buckets.buffered_bytes)} more"
        )
    return notes
