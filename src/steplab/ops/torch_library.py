"""steplab's operators in torch's registry, as steplab::name.

torch.compile, FLOP counters, profilers and selective checkpointing see an operator, and do not look into its function.
They are defined by Library, because the wrapper of torch.library.custom_op takes longer than some of the kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

_library = Library("steplab", "FRAGMENT")


def define(name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register the operator steplab::{name} and return it.

    `schema` is such as "(Tensor x) -> Tensor". `real` computes on every device; `fake` returns results of the same
    shapes, dtypes and layouts.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, real, "CompositeExplicitAutograd")
    register_fake(f"steplab::{name}", fake, lib=_library)
    return getattr(torch.ops.steplab, name)


def define_with_amax(
    name: str, arguments: str, num_results: int, real: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Register steplab::{name} and steplab::{name}_amax, which also returns the first result's largest magnitude.

    `arguments` is such as "(Tensor x)". The magnitude is a float32 scalar on the device of the first argument. `real`
    takes a last argument, a zero into which its kernel writes it.
    """

    def results(found: Any, amax: Tensor) -> tuple[Tensor, ...]:
        return (found, amax) if num_results == 1 else (*found, amax)

    def real_amax(*given: Any) -> tuple[Tensor, ...]:
        amax = given[0].new_zeros((), dtype=torch.float32)
        return results(real(*given, amax), amax)

    def fake_amax(*given: Any) -> tuple[Tensor, ...]:
        return results(fake(*given), given[0].new_empty((), dtype=torch.float32))

    tensors = ["Tensor"] * num_results
    define(name, f"{arguments} -> ({', '.join(tensors)})", real, fake)
    define(f"{name}_amax", f"{arguments} -> ({', '.join([*tensors, 'Tensor'])})", real_amax, fake_amax)


def define_derivative(name: str, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """Register the derivative of steplab::{name}; both functions are as in torch.library.register_autograd."""
    register_autograd(f"steplab::{name}", backward, setup_context=save, lib=_library)
