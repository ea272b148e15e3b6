"""Which of torch's fused attention kernels take a step on a CUDA device: what `run` and `plan` refuse alike.

As aten/src/ATen/native/transformers/cuda/sdp_utils.cpp has it, for NVIDIA cards from Ampere on; what depends on the
card's or on cuDNN's version beyond that is left to torch.
"""

import dataclasses

from steplab.errors import Unsupported
from steplab.specs.step import Attention, StepSpec

_ORDER: tuple[Attention, ...] = ("sdpa_flash", "sdpa_efficient")
_WIDEST = 256
"""Of a head, for the flash kernel and for the largest that cuDNN knows."""


def refuse_unserved_attention(spec: StepSpec) -> None:
    """Raise Unsupported where the one kernel that `spec` admits does not take its tensors on CUDA."""
    shape = spec.model.shape
    if spec.model.kind == "factory" or (shape is not None and shape.num_heads == 0):
        return  # it has built its attention itself, or has none
    if why := _why_not(spec.attention, spec):
        in_half = dataclasses.replace(spec, precision="bf16")
        other = "" if _in_half(spec) or _why_not(spec.attention, in_half) else ", or --precision bf16"
        instead = f"use --attention sdpa, which chooses a kernel that does{other}"
        raise Unsupported(f"attention {spec.attention} with --precision {spec.precision} on CUDA", why, instead)


def chosen_attention(spec: StepSpec) -> Attention:
    """The kernel that serves the step: for sdpa the first in torch's order that takes it, else what was asked."""
    if spec.attention != "sdpa":
        return spec.attention
    return next((name for name in _ORDER if _why_not(name, spec) is None), "sdpa_math")


def _why_not(attention: str, spec: StepSpec) -> str | None:
    """Why a kernel does not take the step; None: it does, or the width of its heads is not known."""
    half, shape = _in_half(spec), spec.model.shape
    if attention in ("sdpa_flash", "sdpa_cudnn") and not half:
        return "that kernel takes bf16 and fp16 alone"
    if shape is None:
        return None
    width, multiple = shape.head_dim, 8 if half else 4
    if attention in ("sdpa_flash", "sdpa_cudnn") and width > _WIDEST:
        return f"that kernel takes heads of at most {_WIDEST}, and these are {width} wide"
    if attention in ("sdpa_efficient", "sdpa_cudnn") and width % multiple:
        return f"that kernel takes heads of a multiple of {multiple}, and these are {width} wide"
    if attention == "sdpa_cudnn" and spec.context == 1:
        return "that kernel takes no context of a single token"
    return None


def _in_half(spec: StepSpec) -> bool:
    return spec.precision in ("bf16", "fp16", "bf16_pure")
