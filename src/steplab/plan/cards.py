"""Judges whether a predicted step fits a GPU.

Besides its tensors' peak, a step needs CUDA's memory outside torch's allocator and the allocator's cache, both taken
from records of an H200 (docs/memory_formulas.md).
"""

from steplab.records.prediction import CardFit, FitVerdict, PredictionKind
from steplab.specs.attention_kernels import why_attention_cannot
from steplab.specs.hardware import HardwareSpec, catalogue
from steplab.specs.layout import Layout
from steplab.specs.step import StepSpec
from steplab.units import MIB

OUTSIDE_BYTES = 784 * MIB
"""The CUDA context, kernel code and libraries' own allocations, all outside torch's allocator.

Recorded steps took up to 762.9 MiB, with cuDNN attention 778.8 MiB.
"""
NCCL_BYTES, COMMUNICATOR_BYTES, PIPELINE_BYTES = 330 * MIB, 483 * MIB, 155 * MIB
"""NCCL's memory: once for the process, for each communicator, and for a pipeline's transfers between neighbours.

Measured on four H200s as device memory in use minus reserved memory, OUTSIDE_BYTES included: 1593 to 1597 MiB with one
communicator, 2076 to 2080 with two, 155 to 160 more with a pipeline (benchmarks/results/layout_h200_202611.md).
"""
RESERVED_MARGIN = 0.10
"""Share added to the reserved memory that the dry run predicts.

Recorded steps reserved up to 8.9 % more than predicted, all except five at most 3.3 % more.
"""
BLOCKS_MARGIN = 0.16
"""RESERVED_MARGIN for blocks compiled one by one: the dry run does not follow allocations within them.

Recorded steps reserved up to 14.8 % more than predicted.
"""
LEAST_USABLE = 0.96
"""Usable share of the stated GiB on a card without a recorded figure.

It is cautious: an H200 has 0.991, a GeForce about 0.98.
"""


def outside_bytes(layout: Layout) -> int:
    """Memory of one rank outside torch's allocator; NCCL has a communicator for each axis of the layout."""
    num_communicators = sum(size > 1 for size in (layout.dp, layout.fsdp, layout.tp, layout.pp))
    of_nccl = NCCL_BYTES + num_communicators * COMMUNICATOR_BYTES if num_communicators else 0
    return OUTSIDE_BYTES + of_nccl + (PIPELINE_BYTES if layout.pp > 1 else 0)


def least_device_bytes(peak_bytes: int) -> int:
    """Memory that a GPU must have if the allocator neither caches nor fragments."""
    return peak_bytes + OUTSIDE_BYTES


def safe_device_bytes(reserved_bytes: int, outside: int = OUTSIDE_BYTES, *, by_compiled_block: bool = False) -> int:
    """Memory with which a GPU safely runs the step: reserved memory, a margin, and CUDA's own.

    Less may do, because the allocator frees its cache before it fails. by_compiled_block: True if blocks are
    compiled one by one, as in every compiled layout; their margin is larger.
    """
    margin = BLOCKS_MARGIN if by_compiled_block else RESERVED_MARGIN
    return round(reserved_bytes * (1 + margin)) + outside


def fits_of(spec: StepSpec, kind: PredictionKind, least_bytes: int, safe_bytes: int | None) -> tuple[CardFit, ...]:
    """Verdicts on all known cards with a kernel for the step's attention, largest usable memory first.

    safe_bytes: from `safe_device_bytes`; None: unknown, so no card 'fits'.
    """
    able = (card for card in catalogue() if why_attention_cannot(spec, card.platform) is None)
    fits = (fit_of(card, kind, least_bytes, safe_bytes) for card in able)
    return tuple(sorted(fits, key=lambda fit: (-fit.usable_bytes, fit.gpu)))


def usable_of(card: HardwareSpec) -> tuple[int, int]:
    if card.usable_bytes is not None:
        return card.usable_bytes, card.usable_bytes
    return int(card.memory_bytes * LEAST_USABLE), card.memory_bytes


def fit_of(card: HardwareSpec, kind: PredictionKind, least_bytes: int, safe_bytes: int | None) -> CardFit:
    usable, most = usable_of(card)
    verdict: FitVerdict = "too tight to promise"
    if least_bytes > most:
        verdict = "does not fit"
    elif kind == "at_least" or safe_bytes is None:
        verdict = "not known"
    elif safe_bytes <= usable:
        verdict = "fits"
    return CardFit(gpu=card.name, usable_bytes=usable, usable_is_known=card.usable_bytes is not None, verdict=verdict)
