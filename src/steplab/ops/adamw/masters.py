"""bfloat16 weights, and the float32 masters that an optimizer keeps of them.

Autocast rounds the float32 weight of a linear layer to bfloat16 before each use, and its gradient is a bfloat16 product
that is then cast to float32. A weight that is bfloat16 from the start, written by the optimizer as its rounded master,
enters the same products, and has the same gradient: neither cast is needed, and no number changes.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn


def bf16_with_masters(module: nn.Module, *, stay: Collection[Tensor] = ()) -> dict[Tensor, Tensor]:
    """Put the weights and biases of linear layers into bfloat16, in place, and give their float32 values by parameter.

    The step runs under autocast as before: it casts these alone before each use. All other parameters stay, as do those
    that another kind of module has as well (an embedding that is the head's weight too), those in `stay`, and those
    that are not float32. Load weights into the module before this, for the masters are the values that it has now.
    """
    staying = {id(parameter) for parameter in stay}
    linear: dict[int, nn.Parameter] = {}
    for each in module.modules():
        own = {id(parameter): parameter for parameter in each.parameters(recurse=False)}
        if type(each) is nn.Linear:
            linear |= own
        else:
            staying |= set(own)
    masters: dict[Tensor, Tensor] = {}
    for key, parameter in linear.items():
        if key not in staying and parameter.dtype == torch.float32:
            masters[parameter] = parameter.data
            parameter.data = parameter.data.to(torch.bfloat16)
    return masters
