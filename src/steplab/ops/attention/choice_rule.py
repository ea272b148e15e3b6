"""Chooses the implementation for `auto` without torch: the fastest for a GPU, a dtype and a head dimension.

On H100 and H200 it takes at most 3 % longer than the fastest at each measured shape
(tests/unit/test_attention_choice.py). On any other GPU, and for wider heads, it is sdpa, torch's own choice.
"""

from dataclasses import dataclass

from .hopper_kernels import planned_on
from .implementations import DTYPES, why_not

FALLBACK = "sdpa"
MEASURED = ("NVIDIA H100", "NVIDIA H200")
WIDEST = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    implementation: str
    """A name that attention() takes, except auto."""
    reason: str
    """A phrase such as 'the fastest measured on H100 and H200 in bfloat16'."""


def choose(
    *,
    device: str,
    dtype: str,
    head_dim: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    grouped: bool = False,
    hopper: bool | None = None,
) -> Choice:
    """Fastest implementation that takes such inputs, or sdpa for unmeasured ones.

    `device` is torch's name of a GPU, or cpu, mps, ...; `dtype` is such as bfloat16. `grouped`: several query heads
    read one key head. `hopper`: True if flash_triton's Hopper kernels run on the device; None: decide by its name, as
    plans do (`planned_on`). Raises ValueError for another dtype or a head dimension below 1.
    """
    if dtype not in DTYPES or head_dim < 1:
        taken = f"one of {', '.join(DTYPES)} and a head dimension of 1 or more"
        raise ValueError(f"attention is chosen for {taken}, not for {dtype} and {head_dim}")
    if not device.startswith(MEASURED) or dtype == "float64":
        return Choice(implementation=FALLBACK, reason=f"nothing was measured on {device} for {dtype}")
    if head_dim > WIDEST:
        return Choice(implementation=FALLBACK, reason=f"nothing was measured beyond head dimension {WIDEST}")
    runs = planned_on(device) if hopper is None else hopper
    without = "" if runs or dtype == "float32" else " without flash_triton's Hopper kernels"
    names = ["sdpa_efficient"] if dtype == "float32" else ["flash_triton"] * runs + ["sdpa_cudnn", "sdpa_flash"]
    for name in names:
        why = why_not(
            name,
            device="cuda",
            dtype=DTYPES[dtype],
            head_dim=head_dim,
            num_queries=num_queries,
            num_keys=num_keys,
            causal=causal,
            grouped=grouped,
        )
        if why is None:
            return Choice(implementation=name, reason=f"the fastest measured on H100 and H200 in {dtype}{without}")
    return Choice(implementation=FALLBACK, reason="nothing that was measured takes such inputs")
