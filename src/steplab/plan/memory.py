"""Predicts the peak GPU memory of a training step without allocating anything: `predict_memory`.

A dry run of the plain Transformer (plan.dry_run) follows every tensor on a CUDA device; the prediction sums those alive
at the peak, each with its formula. docs/memory_formulas.md lists each operator's memory, with sources.
"""

import dataclasses
from collections import Counter

from steplab.costs.flops import num_parameters
from steplab.errors import Unsupported
from steplab.ops.attention.implementations import implementation
from steplab.ops.triton_places import implementation as loss_implementation
from steplab.plan.cards import fits_of, least_device_bytes, safe_device_bytes
from steplab.plan.dry_run.allocator import Ledger, Peak
from steplab.plan.dry_run.parts import BEFORE, BEHIND
from steplab.plan.dry_run.sizes import Count
from steplab.plan.dry_run.step import OpenStep, dry_step, memory_of
from steplab.plan.dry_run.tensors import Piece
from steplab.plan.kernel_time import HOPPER
from steplab.plan.layout.model import TP_OF_TRANSFORMERS, SpreadModel, own_facts
from steplab.plan.layout.prediction import predict_layout_memory
from steplab.plan.terms import by_category, terms_of
from steplab.records.prediction import MemoryPrediction, PredictionKind, Term
from steplab.specs.attention_kernels import chosen_attention, refuse_unserved_attention, with_attention_chosen
from steplab.specs.checkpointing import SELECTIVE, checkpointing_remark
from steplab.specs.ddp import Variant
from steplab.specs.hardware import find_hardware
from steplab.specs.model import TransformerShape
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import RECORD_THEIR_OWN, WITH_MASTERS
from steplab.units import KIB, MIB, format_bytes

HOPPER_WORKSPACE = Count(8 * 4 * MIB, "8 x 4 MiB")
WORKSPACE = Count(2 * 4 * MIB + 8 * 16 * KIB, "2 x 4 MiB + 8 x 16 KiB")
"""Workspace of a cuBLAS handle (CUBLAS_WORKSPACE_CONFIG): torch's default on Hopper, and on any other card."""

_MOST_LAYERS = 200
"""Most blocks that are run dry, which takes a second or two."""


def predict_memory(
    spec: StepSpec,
    *,
    device: str | None = None,
    variant: Variant | None = None,
    open_step: OpenStep = dry_step,
    model: SpreadModel | None = None,
) -> MemoryPrediction:
    """Predict the peak memory that torch's allocator hands out in a step of `spec` on CUDA, by category and by tensor.

    Args:
        device: the GPU's name in torch, which decides attention `auto`; None: a Hopper, such as the H200.
        variant: how data-parallel ranks share state; None: as in `spec.data_parallel`.
        open_step: traces a step of any model (fake_step) instead of the dry run.
        model: the traced model, prepared for its layout.

    With CUDA graphs, and for a planning-only size, the result is a lower bound (`kind`). A layout's prediction is for
    the ranks that need most; all are listed.

    Raises Unsupported for a step off CUDA, and for another model than steplab's own without a trace.
    """
    asked, what, workspace = spec, f"predicting the memory of {spec.model.label}", workspace_of(device)
    hardware = find_hardware(device) if device else None
    platform = hardware.platform if hardware else "cuda"
    if model is not None or open_step is not dry_step:
        refuse_untraced(spec, what)
        refuse_unserved_attention(spec, platform)
        notes = _notes(spec, workspace.value, device, traced=True)
        if model is None:
            return _prediction(spec, memory_of(spec, workspace=workspace, open_step=open_step), "traced", notes)
        notes += [TP_OF_TRANSFORMERS] if spec.layout.tp > 1 else []
        return predict_layout_memory(spec, workspace.value, variant, notes, model)
    shape = _own_shape(spec, what)
    _refuse_what_is_not_known(spec, shape, what)
    spec, said = with_attention_chosen(spec, shape, [device] if device else [])
    refuse_unserved_attention(spec, platform)
    if shape.num_heads == 0:
        return _without_activations(spec)
    notes = [*said, *_notes(spec, workspace.value, device)]
    if spec.layout.world_size > 1 or spec.compile == "block":
        found = predict_layout_memory(spec, workspace.value, variant, notes)
        return dataclasses.replace(found, spec=asked)
    return _prediction(asked, memory_of(spec, workspace=workspace), _kind(spec), notes)


def _prediction(spec: StepSpec, ledger: Ledger, kind: PredictionKind, notes: list[str]) -> MemoryPrediction:
    peak = ledger.peak()
    terms = _terms(peak)
    least = least_device_bytes(peak.num_bytes)
    safe = None if kind == "at_least" else safe_device_bytes(ledger.reserved_bytes)
    return MemoryPrediction(
        peak_bytes=peak.num_bytes,
        at_peak=by_category(terms),
        peak_phase=peak.phase,
        peak_where=": ".join(filter(None, (_place(peak.piece.where, kind), peak.piece.what))),
        terms=terms,
        phase_peaks=dict(ledger.phase_peaks),
        notes=tuple(notes),
        kind=kind,
        reserved_bytes=ledger.reserved_bytes,
        least_device_bytes=least,
        safe_device_bytes=safe,
        cards=fits_of(spec, kind, least, safe),
        model=own_facts(spec.model.shape) if spec.model.shape else None,
        spec=spec,
    )


def _place(where: str, kind: PredictionKind) -> str:
    return "" if kind == "traced" and where in (BEFORE, BEHIND) else where


def workspace_of(device: str | None) -> Count:
    return HOPPER_WORKSPACE if device is None or HOPPER.search(device) else WORKSPACE


def _own_shape(spec: StepSpec, what: str) -> TransformerShape:
    if spec.model.shape is None:
        needed = "torch and transformers" if spec.model.kind == "hf" else "torch"
        fix = f"install {needed}, or measure it with `steplab memory`"
        raise Unsupported(what, "its operators are known by a trace alone", fix)
    return spec.model.shape


def _kind(spec: StepSpec) -> PredictionKind:
    if spec.compile in RECORD_THEIR_OWN:
        return "at_least"
    estimated = implementation(spec.attention).memory_estimate or _rows_estimate(spec)
    is_exact = spec.compile == spec.cuda_graph == "off"
    return "estimate" if not is_exact or estimated else "dry_run"


def _rows_estimate(spec: StepSpec) -> str | None:
    row = loss_implementation(spec.loss)
    if not row.in_chunks or row.in_kernel:
        return None
    return "temporaries smaller than a chunk's logits are not counted"


def refuse_unknown_memory(spec: StepSpec) -> None:
    what = f"predicting the memory of {spec.model.label}"
    if spec.model.kind == "transformer":
        _refuse_what_is_not_known(spec, _own_shape(spec, what), what)
    else:
        refuse_untraced(spec, what)


def refuse_unknown_formats(spec: StepSpec, what: str) -> None:
    if spec.precision == "fp8_torchao":
        why = "the memory and time of torchao's casts are not known"
        raise Unsupported(f"{what} in {spec.precision}", why, "use --precision fp8, or measure it with `steplab run`")


def _refuse_what_is_not_known(spec: StepSpec, shape: TransformerShape, what: str) -> None:
    refuse_unknown_formats(spec, what)
    if spec.device in ("cpu", "mps"):
        why = f"the prediction is of a CUDA device, and {spec.device} allocates otherwise"
        raise Unsupported(what, why, "leave --device out")
    if spec.layout.world_size > 1:
        if spec.optimizer == "adamw_triton" and spec.pass_name == "train":
            why = "the sizes of its tables are known only for one process"
            raise Unsupported(f"{what} on layout {spec.layout} with optimizer adamw_triton", why, "use adamw_fused")
        if not shape.num_heads:
            why = "it is a size for planning only, which no layout can split"
            raise Unsupported(
                f"{what} on layout {spec.layout}", why, "use `steplab plan accounting`, or leave --layout out"
            )
        return
    if shape.num_heads and shape.num_layers > _MOST_LAYERS:
        why = f"it has {shape.num_layers} blocks, and no more than {_MOST_LAYERS} are run dry"
        raise Unsupported(what, why, f"take --model.num-layers {_MOST_LAYERS} or fewer; each further one adds the same")


def refuse_untraced(spec: StepSpec, what: str) -> None:
    if spec.device in ("cpu", "mps"):
        raise Unsupported(what, f"the prediction is of a CUDA device, not of {spec.device}", "leave --device out")
    refuse_unknown_formats(spec, what)
    if spec.optimizer == "adamw_triton" and spec.pass_name == "train":
        instead = "use --pass forward_backward" if spec.precision in WITH_MASTERS else "use adamw_fused"
        raise Unsupported(f"{what} with optimizer adamw_triton", "it has a kernel of its own", instead)


def _terms(peak: Peak) -> tuple[Term, ...]:
    counted = Counter((piece.category, _named(piece), piece.formula, piece.num_bytes) for piece in peak.pieces)
    return terms_of(counted, peak.num_bytes - sum(piece.num_bytes for piece in peak.pieces))


def _named(piece: Piece) -> str:
    """Optimizer state is listed by size alone, gradients without their format."""
    if piece.category == "optimizer_state":
        return piece.what.partition(" of ")[0]
    return piece.what.partition(", in ")[0] if piece.category == "gradients" else piece.what


def _without_activations(spec: StepSpec) -> MemoryPrediction:
    shape = spec.model.shape
    assert shape is not None
    masters = spec.precision in WITH_MASTERS
    width = 2 if masters or spec.precision == "bf16_pure" else 4
    state_width = 4 if masters else width
    trains = spec.pass_name == "train"
    kept = (
        ("parameters", "parameters", width, 1),
        ("gradients", "gradients", width, spec.pass_name != "forward"),
        ("optimizer_state", "moments", state_width, 2 * (trains and spec.optimizer != "sgd")),
        ("optimizer_state", "masters", state_width, trains and masters),
    )
    terms = tuple(
        Term(
            category=category,
            what=what,
            formula=f"{each} (2 L d f)",
            num_bytes=each * num_parameters(shape),
            count=int(count),
        )
        for category, what, each, count in kept
        if count
    )
    last_phase = "forward" if spec.pass_name == "forward" else "backward"
    if spec.pass_name == "train" and not spec.updates_in_backward:
        last_phase = "optimizer"
    why = f"at least this: '{spec.model.name}' is a size for planning only, whose activations are not defined"
    total = by_category(terms)
    peak_bytes = sum(total.values())
    least = least_device_bytes(peak_bytes)
    return MemoryPrediction(
        peak_bytes=peak_bytes,
        at_peak=total,
        peak_phase=last_phase,
        peak_where="weights and what training keeps for each",
        terms=terms,
        notes=(why,),
        kind="at_least",
        least_device_bytes=least,
        cards=fits_of(spec, "at_least", least, None),
        model=own_facts(shape),
        spec=spec,
    )


def _kept_by_torch_2_11(spec: StepSpec) -> int:
    """Bytes of attention's output and log-sum-exp rows, which torch 2.11 keeps of a recomputed compiled block.

    It is 0 unless attention is a steplab operator.
    """
    shape = spec.model.shape
    is_own = spec.compile == "block" and spec.attention in ("flash_triton", "flash_reference")
    if not shape or not is_own or not spec.checkpoints_apply or spec.checkpointing in ("none", *SELECTIVE):
        return 0
    element = 4 if spec.precision in ("fp32", "tf32") else 2
    return spec.tokens // spec.num_microbatches * (element * shape.d_model + 4 * shape.num_heads) // spec.layout.tp


def _notes(spec: StepSpec, workspace_bytes: int, device: str | None, *, traced: bool = False) -> list[str]:
    card = device or "a Hopper (H100, H200)"
    notes = [
        f"on {card}: cuBLAS takes {format_bytes(workspace_bytes)} for each thread that multiplies matrices",
        "outside of the allocator, and not in it: the CUDA context, the kernels' code, NCCL",
    ]
    if traced:
        notes.append(
            "traced: torch ran the model on tensors without content; memory within kernels is known only for "
            "softmax and fused attention"
        )
        return notes
    if spec.compile != "off":
        notes.append(
            "compiled: an estimate, from the tensors that torch 2.13's compiler keeps of these blocks; tensors "
            "between are not counted"
        )
        if kept_bytes := _kept_by_torch_2_11(spec):
            notes.append(
                f"torch 2.11 also keeps the output of {spec.attention} of each recomputed block, "
                f"{format_bytes(kept_bytes)} a block, and does not compute it again"
            )
        if spec.compile in RECORD_THEIR_OWN:
            notes.append("CUDA graphs keep a pool of their own, which is not counted: the peak is at least this")
    if spec.cuda_graph == "step":
        notes.append(
            "CUDA graphs: an estimate, from the step's allocations while it is recorded; their pool keeps that memory "
            "between the steps"
        )
    if spec.attention == "sdpa":
        notes.append(f"attention sdpa: {implementation(chosen_attention(spec)).chosen_by_sdpa}")
    if estimate := implementation(spec.attention).memory_estimate:
        notes.append(f"attention {spec.attention}: {estimate}")
    if of_loss := _rows_estimate(spec):
        notes.append(f"loss {spec.loss}: {of_loss}")
    layers = spec.model.shape.num_layers if spec.model.shape else None
    remark = checkpointing_remark(spec.checkpointing, num_layers=layers, gradients=spec.pass_name != "forward")
    return [*notes, remark] if remark else notes
