"""torch's scaled_dot_product_attention, with its own choice of kernel or with one kernel alone."""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SDPA_BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


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

    Raises torch's RuntimeError ("No available kernel") where the named kernel does not take these inputs.
    """
    if backend is None:
        return scaled_dot_product_attention(q_BHSD, k_BHKD, v_BHKD, is_causal=causal, scale=scale)
    with sdpa_kernel(SDPA_BACKENDS[backend]):
        return scaled_dot_product_attention(q_BHSD, k_BHKD, v_BHKD, is_causal=causal, scale=scale)
