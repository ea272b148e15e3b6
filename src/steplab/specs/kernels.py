"""Which kernels a step asks for that its device does not have, before anything is built."""

from steplab.errors import Unsupported
from steplab.ops.cross_entropy_table import implementation
from steplab.ops.triton_places import runs_on
from steplab.specs.attention_kernels import refuse_unserved_attention
from steplab.specs.step import StepSpec


def refuse_unserved_kernels(spec: StepSpec, device: str) -> None:
    """Raise Unsupported if the attention or the loss that `spec` names does not run on a device of this kind: cuda, cpu
    or mps."""
    refuse_unserved_attention(spec, device)
    if implementation(spec.loss).in_kernel and not runs_on(device):
        raise Unsupported(f"loss {spec.loss} on {device}", "its kernel is for CUDA", "use --loss chunked, or plain")
