"""torch's scaled_dot_product_attention, with its own choice of kernel or with one kernel alone."""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..errors import Unsupported
from .shapes import refuse_unserved

SDPA_BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NO_KERNEL = ("No available kernel", "No viable backend")
"""What torch says when the kernels that it may use do not take the inputs."""


def sdpa_attention(
    q_BHSD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """torch's fused attention; backend None lets torch choose, a name admits that kernel alone.

    Raises Unsupported where the named kernel does not take these inputs.
    """
    grouped = q_BHSD.dim() > 2 and q_BHSD.shape[-3] != k_BHKD.shape[-3]
    if backend is None:
        return scaled_dot_product_attention(q_BHSD, k_BHKD, v_BHKD, is_causal=causal, scale=scale, enable_gqa=grouped)
    refuse_unserved(f"sdpa_{backend}", q_BHSD, k_BHKD, causal=causal)  # torch would first warn of each kernel not tried
    try:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return scaled_dot_product_attention(
                q_BHSD, k_BHKD, v_BHKD, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        raise Unsupported(
            f"attention 'sdpa_{backend}'",
            f"torch has no kernel for {str(q_BHSD.dtype).removeprefix('torch.')} queries {list(q_BHSD.shape)} and keys "
            f"{list(k_BHKD.shape)} on {q_BHSD.device.type}",
            "choose sdpa, or another precision or shape",
        ) from None
