"""An Inductor graph pass: matmuls write gradients of fp32 weights in fp32, without a cast.

Under autocast a weight's gradient is a rounded bf16 product, which another kernel casts to fp32. cuBLAS sums products
in fp32 anyway, and can write its sums unrounded: one kernel less for each weight, and less traffic.
"""

from functools import cache
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_aten, _prims = torch.ops.aten, torch.ops.prims
_VIEWS = (_aten.permute.default, _aten.view.default, _aten.reshape.default)
_HALF = (torch.bfloat16, torch.float16)


class GradientsOfProducts(CustomGraphPass):  # type: ignore[misc]
    """Replaces a matmul and its cast to fp32 by a matmul with an fp32 result, on CUDA. It leaves casts alone unless
    they are outputs of the graph, as weights' gradients are.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for cast in graph.find_nodes(op="call_function", target=_prims.convert_element_type.default):
            product, views = _product_of(cast)
            leaves = all(user.op == "output" for user in cast.users)
            if product is not None and cast.args[1] == torch.float32 and leaves:
                _widen(graph, cast, product, views)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


@cache
def gradients_of_products() -> GradientsOfProducts:
    """The shared Inductor graph pass: one object for all functions, so that torch.compile sees equal options."""
    return GradientsOfProducts()


def _product_of(cast: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The half-precision GPU matmul that only this cast reads, or None; and the views in between."""
    views: list[fx.Node] = []
    node = cast.args[0]
    while isinstance(node, fx.Node) and len(node.users) == 1:
        value = node.meta.get("val")
        if node.target is _aten.mm.default and value.device.type == "cuda" and value.dtype in _HALF:
            return node, views
        if node.target not in _VIEWS:
            break
        views.append(node)
        node = node.args[0]
    return None, views


def _widen(graph: fx.Graph, cast: fx.Node, product: fx.Node, views: list[fx.Node]) -> None:
    with graph.inserting_before(product):
        wide = graph.call_function(_aten.mm.dtype, (*product.args, torch.float32))
    wide.meta = product.meta | {"val": product.meta["val"].to(torch.float32)}
    for view in views:
        view.meta["val"] = view.meta["val"].to(torch.float32)
    product.replace_all_uses_with(wide)
    cast.replace_all_uses_with(cast.all_input_nodes[0])
    graph.erase_node(cast)
    graph.erase_node(product)
