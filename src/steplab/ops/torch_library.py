"""Operators of steplab's own in torch's registry, as steplab::name.

An operator is what torch.compile, FLOP counters, profilers and selective checkpointing see of a function, and do not
look into. They are defined by Library and not by torch.library.custom_op, whose wrapper takes longer than some of the
kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake

_library = Library("steplab", "FRAGMENT")


def define(name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator steplab::name of a schema such as "(Tensor x) -> Tensor".

    `real` computes it, on every device; `fake` gives results of the same shapes, formats and layouts without computing.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, real, "CompositeExplicitAutograd")
    register_fake(f"steplab::{name}", fake, lib=_library)
    return getattr(torch.ops.steplab, name)


def define_derivative(name: str, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """Give steplab::name a backward pass, and what is kept for it, as torch.library.register_autograd takes both."""
    register_autograd(f"steplab::{name}", backward, setup_context=save, lib=_library)
