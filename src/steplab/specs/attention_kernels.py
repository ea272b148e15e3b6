"""Kernels of a step: refuses those that a device does not support, and resolves attention `auto`."""

from collections.abc import Sequence
from dataclasses import replace

from steplab.errors import Unsupported
from steplab.ops.attention.choice_rule import FALLBACK, Choice, choose
from steplab.ops.attention.implementations import BF16, DTYPES, FP16, FP32, TABLE, implementation, why_not
from steplab.ops.triton_places import implementation as loss_implementation
from steplab.ops.triton_places import runs_on
from steplab.specs.model import TransformerShape
from steplab.specs.step import StepSpec
from steplab.specs.step_choices import WITH_MASTERS

_DTYPES = {"fp32": FP32, "tf32": FP32, "fp16": FP16, **dict.fromkeys(("bf16", "bf16_pure", *WITH_MASTERS), BF16)}


def refuse_unserved_kernels(spec: StepSpec, device: str) -> None:
    refuse_unserved_attention(spec, device)
    if loss_implementation(spec.loss).in_kernel and not runs_on(device):
        raise Unsupported(f"loss {spec.loss} on {device}", "its kernel is for CUDA", "use --loss chunked, or plain")


def refuse_unserved_attention(spec: StepSpec, device: str = "cuda") -> None:
    """Raise Unsupported if the attention cannot run on this kind of device: cuda, rocm, cpu or mps."""
    why = why_attention_cannot(spec, device)
    if why is None:
        return
    helps = _DTYPES[spec.precision] == FP32 and not why_attention_cannot(replace(spec, precision="bf16"), device)
    instead = "use --attention sdpa, which chooses a kernel" + (", or --precision bf16" if helps else "")
    where = "an AMD GPU (rocm)" if device == "rocm" else device
    raise Unsupported(f"attention {spec.attention} on {where}", why, instead)


def why_attention_cannot(spec: StepSpec, device: str) -> str | None:
    """Why the device cannot run the attention, such as no backward pass on a CPU; None: it can."""
    shape, row = spec.model.shape, implementation(spec.attention)
    if spec.model.kind == "factory" or (shape is not None and shape.num_heads == 0):
        return None  # its attention is its own, or absent
    if row.package == "triton" and runs_on(device):
        device = "cuda"  # Triton's interpreter takes the same as a GPU
    why = _why_not(spec.attention, spec, device)
    if why is None and device == "cpu" and not row.trains_on_cpu and spec.pass_name != "forward":
        return "it has no backward pass there"
    return why


def chosen_attention(spec: StepSpec) -> str:
    """The step's attention; sdpa becomes the first kernel in torch's order that supports the step."""
    if spec.attention != "sdpa":
        return spec.attention
    return next(row.name for row in TABLE if row.chosen_by_sdpa and _why_not(row.name, spec) is None)


def chosen_by_auto(spec: StepSpec, shape: TransformerShape, device_name: str, *, hopper: bool | None = None) -> Choice:
    """Implementation that `auto` chooses for this step. `device_name`: from ops.attention.api.device_name; `hopper`:
    True if flash_triton's Hopper kernels run there, None: as plans assume."""
    return choose(
        device=device_name,
        dtype=next(torch_name for torch_name, name in DTYPES.items() if name == _DTYPES[spec.precision]),
        head_dim=shape.head_dim,
        num_queries=spec.context,
        num_keys=spec.context,
        causal=True,
        grouped=shape.num_kv_heads is not None,
        hopper=hopper,
    )


def with_attention_chosen(
    spec: StepSpec, shape: TransformerShape | None, device_names: Sequence[str]
) -> tuple[StepSpec, tuple[str, ...]]:
    """Resolve attention `auto` on these GPUs; return the step, with a note if it changed."""
    if spec.attention != "auto" or shape is None or not shape.num_heads or not device_names:
        return spec, ()
    choices = [chosen_by_auto(spec, shape, name) for name in device_names]
    chosen = next((each for each in choices if each.implementation != FALLBACK), choices[0])
    return replace(spec, attention=chosen.implementation), (choice_told(chosen),)


def choice_told(choice: Choice) -> str:
    return f"attention auto: {choice.implementation}, {choice.reason}"


def _why_not(attention: str, spec: StepSpec, device: str = "cuda") -> str | None:
    return why_not(
        attention,
        device=device,
        dtype=_DTYPES[spec.precision],
        head_dim=spec.model.shape.head_dim if spec.model.shape else None,
        num_queries=spec.context,
        num_keys=spec.context,
        causal=True,
        grouped=spec.model.shape is not None and spec.model.shape.num_kv_heads is not None,
    )
