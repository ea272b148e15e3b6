"""Tests the Hopper kernels on a small input before their first use with an untested Triton."""

import warnings
from math import sqrt
from threading import Thread, local

import torch

from .hopper_kernels import is_tried, remedy, too_old
from .plain import plain_attention
from .triton_repeats import forget, refuse_while_capturing

CLOSE = 0.02
"""Largest relative error, by norm, that passes: bf16 makes 0.002 to 0.01, a wrong kernel about 1."""
_thread = local()
_tried: dict[int, str | None] = {}
"""Why the Hopper kernels do not run with an untested Triton, by head dimension; None if they do."""


def hopper_kernels_run(head_dim: int = 64) -> bool:
    """True if the Hopper kernels for this head dimension run on the current Hopper GPU with the installed Triton.

    Raises Unsupported if they must be tested while a CUDA graph is recorded.
    """
    if getattr(_thread, "trying", False):
        return True
    import triton

    return why_not_hopper(triton.__version__, head_dim) is None


def known_to_run() -> bool | None:
    """As `hopper_kernels_run` for all head dimensions, but without a trial; None if unknown."""
    import triton

    if too_old(triton.__version__) or is_tried(triton.__version__):
        return is_tried(triton.__version__)
    return all(why is None for why in _tried.values()) if _tried else None


def why_not_hopper(version: str, head_dim: int = 64) -> str | None:
    """Why the Hopper kernels do not run with this Triton; None if they do. Warns if a trial failed."""
    if too_old(version):
        return f"Triton {version} is too old for them"
    if is_tried(version):
        return None
    if head_dim not in _tried:
        _tried[head_dim] = _trial(version, head_dim)
    return _tried[head_dim]


def _trial(version: str, head_dim: int) -> str | None:
    device = torch.cuda.current_device()
    refuse_while_capturing(torch.device("cuda", device))
    found: list[str | None] = []
    # A new thread has neither autocast nor the modes of torch.compile.
    thread = Thread(target=lambda: found.append(_fault(device, head_dim)))
    thread.start()
    thread.join()
    if found[0] is None:
        return None
    forget()
    why = f"they do not work with Triton {version}: {found[0]}"
    warnings.warn(
        f"flash_triton runs its slower portable kernels instead of Hopper's: {why}; {remedy(version)}",
        RuntimeWarning,
        stacklevel=2,
    )
    return why


def _fault(device: int, head_dim: int) -> str | None:
    from .triton_backward import triton_backward
    from .triton_forward import triton_forward

    _thread.trying = True
    try:
        with torch.cuda.device(device):
            drawn = torch.Generator("cuda").manual_seed(0)
            shape = 1, 2, 320, head_dim
            q, k, v, do = (torch.randn(shape, generator=drawn, device="cuda").bfloat16() for _ in range(4))
            scale = 1 / sqrt(head_dim)
            o, lse = triton_forward(q, k, v, causal=True, scale=scale)
            found = o, *triton_backward(do, q, k, v, o, lse, causal=True, scale=scale)
            exact = [x.double().requires_grad_() for x in (q, k, v)]
            right = plain_attention(*exact, causal=True)
            expected = right.detach(), *torch.autograd.grad(right, exact, do.double())
            errors = [((x - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True)]
    except Exception as error:  # whatever another compiler makes of them
        return f"{type(error).__name__}, {str(error).strip().partition(chr(10))[0]}"
    names = ("the output", "dQ", "dK", "dV")
    wrong = [f"{name} by {error:.2g}" for name, error in zip(names, errors, strict=True) if not error <= CLOSE]
    return f"{', '.join(wrong)} off" if wrong else None
