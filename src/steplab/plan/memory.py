"""The peak of a training step's memory, predicted before anything is allocated: `predict_memory`.

The step is run dry (see plan.dry_run): the operators of the plain Transformer, on a CUDA device. What is alive at the
highest moment is the sum that is given, each summand with its formula; docs/memory_formulas.md lists what each operator
allocates and keeps, and where that is read off.
"""

import re
from collections import Counter

from steplab.costs.parameters import num_parameters
from steplab.errors import Unsupported
from steplab.plan.dry_run.memory import Peak, Piece
from steplab.plan.dry_run.step import run_dry
from steplab.records.memory_profile import MEMORY_CATEGORIES
from steplab.records.prediction import MemoryPrediction, Term
from steplab.specs.step import StepSpec
from steplab.units import MIB, format_bytes

HOPPER_WORKSPACE_BYTES = 32 * MIB
WORKSPACE_BYTES = 2 * 4 * MIB + 8 * 16 * 1024
"""Of a cuBLAS handle (CUBLAS_WORKSPACE_CONFIG): torch's default for Hopper, and for any other card."""

_MOST_LAYERS = 1_000
"""A few seconds."""
_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


def predict_memory(spec: StepSpec, *, device: str | None = None) -> MemoryPrediction:
    """Most bytes that torch's allocator hands out at once in a step of `spec` on CUDA, by category and by summand.

    `device` is the GPU's name as torch gives it; None: a Hopper, such as the H200. Raises Unsupported for a step that
    does not run on CUDA, and for a model other than a built-in size, whose operators are not known.
    """
    _refuse_what_is_not_known(spec)
    shape = spec.model.shape
    assert shape is not None
    if shape.num_heads == 0:
        return _without_activations(spec)
    on_hopper = device is None or _HOPPER.search(device) is not None
    workspace_bytes = HOPPER_WORKSPACE_BYTES if on_hopper else WORKSPACE_BYTES
    ledger = run_dry(spec, workspace_bytes=workspace_bytes)
    peak = ledger.peak()
    terms = _terms(peak)
    return MemoryPrediction(
        peak_bytes=peak.num_bytes,
        at_peak=_by_category(terms),
        peak_phase=peak.phase,
        peak_where=f"{peak.piece.where}: {peak.piece.what}",
        terms=terms,
        phase_peaks=dict(ledger.phase_peaks),
        notes=tuple(_notes(spec, workspace_bytes, device)),
    )


def _refuse_what_is_not_known(spec: StepSpec) -> None:
    what, shape = f"predicting the memory of {spec.model.label}", spec.model.shape
    if shape is None:
        why = "what operators allocate and keep is known of steplab's own Transformer alone"
        raise Unsupported(what, why, "measure it with `steplab memory`, or replace the sizes of a built-in model")
    if spec.device in ("cpu", "mps"):
        why = f"the prediction is of a CUDA device, and {spec.device} allocates otherwise"
        raise Unsupported(what, why, "leave --device out")
    if shape.num_heads and shape.num_layers > _MOST_LAYERS:
        why = f"it has {shape.num_layers} blocks, and no more than {_MOST_LAYERS} are run dry"
        raise Unsupported(what, why, "take fewer: from the second on, each adds the same")


def _terms(peak: Peak) -> tuple[Term, ...]:
    """What is alive at the peak, tensors alike in one term, largest first within a category; rounding last."""
    counted = Counter((piece.category, _named(piece), piece.formula, piece.num_bytes) for piece in peak.pieces)
    terms = [
        Term(category=category, what=what, formula=formula, num_bytes=num_bytes, count=count)
        for (category, what, formula, num_bytes), count in counted.items()
    ]
    terms.sort(key=lambda term: (MEMORY_CATEGORIES.index(term.category), -term.num_bytes * term.count, term.what))
    rounding = peak.num_bytes - sum(piece.num_bytes for piece in peak.pieces)
    what = "blocks of 512 bytes; remainders up to 1 MiB that are not split off"
    return (*terms, Term(category="rounding", what=what, formula="blocks - bytes asked for", num_bytes=rounding))


def _named(piece: Piece) -> str:
    """State of the optimizer is told by its sizes alone; a gradient has the format of its weight."""
    if piece.category == "optimizer_state":
        return piece.what.partition(" of ")[0]
    return piece.what.partition(", in ")[0] if piece.category == "gradients" else piece.what


def _by_category(terms: tuple[Term, ...]) -> dict[str, int]:
    totals = {
        category: sum(term.num_bytes * term.count for term in terms if term.category == category)
        for category in MEMORY_CATEGORIES
    }
    return {category: total for category, total in totals.items() if total}


def _without_activations(spec: StepSpec) -> MemoryPrediction:
    """Of a size for planning only: its weights, and what training keeps for each of them."""
    shape = spec.model.shape
    assert shape is not None
    width = 2 if spec.precision == "bf16_pure" else 4
    kept = {"parameters": 1}
    if spec.pass_name != "forward":
        kept["gradients"] = 1
    if spec.pass_name == "train" and spec.optimizer != "sgd":
        kept["optimizer_state"] = 2
    terms = tuple(
        Term(
            category=category,
            what={"optimizer_state": "moments"}.get(category, category),
            formula=f"{width} (2 L d f)",
            num_bytes=width * num_parameters(shape),
            count=count,
        )
        for category, count in kept.items()
    )
    why = f"'{spec.model.name}' is a size for planning only: its activations are not defined, so this is the least"
    total = _by_category(terms)
    return MemoryPrediction(
        peak_bytes=sum(total.values()),
        at_peak=total,
        peak_phase={"forward": "forward", "forward_backward": "backward"}.get(spec.pass_name, "optimizer"),
        peak_where="weights and what training keeps for each",
        terms=terms,
        notes=(why,),
    )


def _notes(spec: StepSpec, workspace_bytes: int, device: str | None) -> list[str]:
    """What is assumed, and what is left out."""
    card = device or "a Hopper (H100, H200)"
    notes = [
        f"on {card}: cuBLAS takes {format_bytes(workspace_bytes)} for each thread that multiplies matrices",
        "outside of the allocator, and not in it: the CUDA context, the kernels' code, NCCL",
    ]
    if spec.compile != "off":
        notes.append(
            "compiled: an estimate, from what the compiler of torch 2.13 chose to keep of these blocks; what passes "
            "between is not followed"
        )
        if spec.compile in ("reduce-overhead", "max-autotune"):
            notes.append("CUDA graphs keep a pool of their own, which is not counted")
    if spec.attention == "sdpa":
        notes.append("attention sdpa: taken to be a flash kernel in half precision, the memory-efficient one in fp32")
    if spec.attention == "sdpa_cudnn":
        notes.append("attention sdpa_cudnn: cuDNN's workspace is not known, and taken to be that of the flash kernel")
    return notes
