"""Calls that were made before on the same memory, and the launches that they consisted of.

In a training step the caching allocator gives the tensors of a layer the addresses that they had in the step before.
What kernels are started with depends on addresses, shapes, strides, type, device, stream and a few numbers, and on
nothing else; so where all of these were seen before, the same launches are made again, and nothing is looked at twice.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from steplab.errors import Unsupported
from steplab.ops.attention.triton_launcher import Launch, hooked

MOST_KEPT = 1024
"""Calls, of some kilobytes each: the layers and micro-steps of a large model, forward and backward."""
_known: dict[Hashable, tuple[Sequence[Launch], object]] = {}


def call_key(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], *more: Hashable) -> Hashable:
    """What the launches of a call depend on; None where its launches are not kept.

    inputs begin with q and k; outputs are laid out as the inputs decide. `more` is all that is asked for besides.
    """
    q, k, *_ = inputs
    if not q.is_cuda or (device := q.get_device()) != torch.cuda.current_device():
        return None
    addresses, strides = map(Tensor.data_ptr, inputs + outputs), map(Tensor.stride, inputs)
    return (_stream(device), device, q.dtype, q.shape, k.shape, *more, *addresses, *strides)


def made_again(key: Hashable) -> bool:
    """Make the launches of such a call, where they are known."""
    known = _known.get(key)
    if known is None or hooked():
        return False
    for launch in known[0]:
        launch()
    return True


def keep(key: Hashable, launches: Sequence[Launch | None], needed: object = None) -> None:
    """Keep the launches of a call, unless one is not to be had, and what they read besides the call's tensors."""
    ready = [launch for launch in launches if launch is not None]
    if key is None or len(ready) < len(launches) or hooked():
        return
    if len(_known) >= MOST_KEPT:  # addresses that do not come back: begin anew
        _known.clear()
    _known[key] = ready, needed


def forget() -> None:
    """Forget all calls: for who changes by which kernels a call is made."""
    _known.clear()


def stream_of(key: Hashable) -> int | None:
    """The raw stream of a call that `call_key` made."""
    return key[0] if isinstance(key, tuple) else None


def refuse_while_capturing(device: torch.device) -> None:
    """Raise Unsupported where a CUDA graph is recorded: at a first call kernels are loaded and tables copied."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "the first call of 'flash_triton' for a shape while a CUDA graph is recorded",
            "its kernels are loaded and its tables are copied then, which a graph cannot record",
            "call it once before, forward and backward, with tensors of the same shapes and strides",
        )


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# Without a Python object around it, where torch has this: what its own compiled code takes.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
