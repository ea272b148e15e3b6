"""Checks that the choices of a step fit each other, before anything is built; those of its layout are in layout_fit."""

from typing import TYPE_CHECKING

from steplab.errors import Unsupported
from steplab.specs.cuda_graph import RECORD_THEIR_OWN, refuse_unserved_graph
from steplab.specs.update import IN_FLIGHT, OVERLAPPED

if TYPE_CHECKING:  # which asks here
    from steplab.specs.step import StepSpec

_OFF = "or --cuda-graph off"
_AFTER = "or --update after"
_PLAIN = "or --block-ops plain"


def refuse_unrecorded_step(spec: "StepSpec") -> None:
    """Raise Unsupported for a step that is to be recorded as CUDA graphs and cannot be."""
    if spec.cuda_graph != "step":
        return
    refuse_unserved_graph(spec.device)
    if spec.compile in RECORD_THEIR_OWN:
        why = "that mode records CUDA graphs of its own"
        raise Unsupported(
            f"cuda_graph step with compile {spec.compile}", why, f"use --compile block, default or off, {_OFF}"
        )
    if spec.precision == "fp16":
        why = "its gradient scaler waits for the GPU in each step to look for overflows"
        raise Unsupported("cuda_graph step with precision fp16", why, f"use --precision bf16, {_OFF}")
    if spec.layout.world_size > 1:
        why = "steplab does not record communication between processes"
        raise Unsupported(f"cuda_graph step with {spec.layout.world_size} processes", why, f"use one process, {_OFF}")


def refuse_unserved_update(spec: "StepSpec") -> None:
    """Raise Unsupported for an overlapped update that needs all gradients first, or gets them all at once."""
    if spec.update != OVERLAPPED or spec.pass_name != "train":
        return
    what, layout = "update overlapped with", spec.layout
    if spec.precision == "fp16":
        why = "its gradient scaler looks for overflows in all gradients before an update"
        raise Unsupported(f"{what} precision fp16", why, f"use --precision bf16, {_AFTER}")
    if layout.world_size > layout.dp:
        why = "torch's engines finish all gradients at the end"
        raise Unsupported(f"{what} layout {layout}", why, f"use dp={layout.world_size}, {_AFTER}")
    if layout.dp > 1 and spec.data_parallel not in IN_FLIGHT:
        why = "it sends all gradients after the backward pass"
        raise Unsupported(f"{what} data_parallel {spec.data_parallel}", why, f"use --data-parallel bucketed, {_AFTER}")
    if layout.world_size == 1 and spec.compile not in ("off", "block"):
        why = "a model compiled as a whole makes all gradients at the end of its backward pass"
        raise Unsupported(f"{what} compile {spec.compile}", why, f"use --compile block, {_AFTER}")


def refuse_unserved_triton_optimizer(spec: "StepSpec") -> None:
    """Raise Unsupported for parameters that the optimizer in one kernel does not take."""
    layout = spec.layout
    if spec.optimizer != "adamw_triton" or spec.pass_name != "train":
        return
    if spec.precision == "bf16_pure":
        raise Unsupported(
            "optimizer adamw_triton with precision bf16_pure", "its kernel is for float32", "use adamw_fused"
        )
    if layout.world_size > layout.dp:
        why = "its kernel takes whole tensors, and parameters are parts of tensors there"
        raise Unsupported(f"optimizer adamw_triton with layout {layout}", why, "use adamw_fused")


def refuse_unserved_masters(spec: "StepSpec") -> None:
    """Raise Unsupported where bf16 weights with fp32 masters would train otherwise than autocast over fp32 weights, and
    for an optimizer that keeps no masters."""
    if spec.precision != "bf16_master":
        return
    layout, micro_steps = spec.layout, spec.micro_steps
    what, instead = "precision bf16_master", "use --precision bf16"
    if layout.world_size > 1:
        raise Unsupported(f"{what} with layout {layout}", "ranks would add up their gradients in bf16", instead)
    if micro_steps > 1:
        why = "gradients of micro-steps would be added up in bf16"
        raise Unsupported(f"{what} with accumulation {micro_steps}", why, f"{instead}, or a larger --batch")
    if spec.optimizer != "adamw_triton" and spec.pass_name == "train":
        why = "the optimizer has to keep fp32 masters of the weights"
        raise Unsupported(f"{what} with optimizer {spec.optimizer}", why, "use --optimizer adamw_triton")


def refuse_unserved_block_ops(spec: "StepSpec") -> None:
    """Raise Unsupported for a model, a layout or a kind of device that the kernels do not serve. All three of them run,
    or none, so that the name of the choice says what was measured."""
    if spec.block_ops != "triton":
        return
    model, layout, shape, what = spec.model, spec.layout, spec.model.shape, "block_ops triton with"
    if shape is None or shape.num_heads == 0:
        raise Unsupported(f"{what} {model.name}", "it has no block of steplab's Transformer", "use --block-ops plain")
    if shape.projections != "merged":
        why = "its kernels read queries, keys and values, and gate and up, from one tensor"
        raise Unsupported(f"{what} separate projections", why, f"use --model.projections merged, {_PLAIN}")
    if shape.norm != "rmsnorm" or shape.feed_forward != "swiglu" or shape.learned_positions:
        why = "its kernels are for RMSNorm, SwiGLU and rotary embedding"
        raise Unsupported(f"{what} {model.label}", why, "use --block-ops plain, or a model with these parts")
    if layout.world_size > layout.dp:
        why = "parameters are parts of tensors there"
        raise Unsupported(f"{what} layout {layout}", why, f"use dp={layout.world_size}, {_PLAIN}")
    if spec.device == "mps":
        raise Unsupported(f"{what} device mps", "its kernels are for CUDA", "use --block-ops plain")
