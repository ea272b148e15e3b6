"""torch's scaled_dot_product_attention, with its own choice of kernel or with one kernel alone."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from steplab.errors import Unsupported
from steplab.ops.attention.autocast import autocast_dtype

SDPA_BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_WITHOUT_CPU = ("cudnn", "efficient")
_HALVES = (torch.bfloat16, torch.float16)
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
    _refuse(backend, q_BHSD, grouped=grouped)
    try:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return scaled_dot_product_attention(
                q_BHSD, k_BHKD, v_BHKD, is_causal=causal, scale=scale, enable_gqa=grouped
            )
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        raise _unsupported(backend, q_BHSD, f"queries {list(q_BHSD.shape)}, keys {list(k_BHKD.shape)}") from None


def _refuse(backend: str, q: Tensor, *, grouped: bool) -> None:
    """Raise for what is known of a kernel beforehand: torch would first warn of every kernel that it did not try."""
    kind = q.device.type
    if kind == "cpu" and backend in _WITHOUT_CPU:
        raise _unsupported(backend, q)
    if kind != "cuda":
        return
    dtype = autocast_dtype(kind) or q.dtype
    if (backend in ("flash", "cudnn") and dtype not in _HALVES) or (backend == "efficient" and dtype == torch.float64):
        raise _unsupported(backend, q)
    if backend == "efficient" and grouped:
        raise _unsupported(backend, q, "grouped-query heads")


def _unsupported(backend: str, q: Tensor, of: str = "") -> Unsupported:
    inputs = f"{str(q.dtype).removeprefix('torch.')}{f', {of},' if of else ''} on {q.device.type}"
    return Unsupported(
        f"attention 'sdpa_{backend}'", f"it has no kernel for {inputs}", "choose sdpa, or another precision or shape"
    )
