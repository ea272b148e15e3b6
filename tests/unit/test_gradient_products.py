"""The change of compiled backward passes that makes gradients of fp32 weights in their product."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from steplab.model import compiling
from steplab.model.gradient_products import GradientsOfProducts, gradients_of_products

aten, prims = torch.ops.aten, torch.ops.prims


def graph_of(device: str, *, read_again: bool = False, leaves: bool = True) -> fx.Graph:
    """A gradient as autocast makes it: a bf16 product, turned, and cast to float32."""
    graph = fx.Graph()

    def call(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        node.meta["val"] = target(*values)  # type: ignore[operator]
        return node

    with FakeTensorMode():
        inputs = [graph.placeholder(name) for name in ("gradient", "x")]
        for node, shape in zip(inputs, ((6, 8), (8, 4)), strict=True):
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        product = call(aten.mm.default, *inputs)
        cast = call(prims.convert_element_type.default, call(aten.permute.default, product, [1, 0]), torch.float32)
        results = (cast if leaves else call(aten.neg.default, cast), *([product] if read_again else []))
    graph.output(results)
    return graph


def products_of(graph: fx.Graph) -> list[object]:
    GradientsOfProducts()(graph)
    graph.lint()
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_cast_product_that_leaves_the_graph_is_made_in_float32() -> None:
    graph = graph_of("cuda")
    assert products_of(graph) == [aten.mm.dtype, aten.permute.default]
    product, turned = (node for node in graph.nodes if node.op == "call_function")
    assert product.args[2] == torch.float32
    values: list[Tensor] = [node.meta["val"] for node in (product, turned)]
    assert [(tuple(value.shape), value.dtype) for value in values] == [((6, 4), torch.float32), ((4, 6), torch.float32)]


def test_what_else_reads_a_product_keeps_it_as_it_is() -> None:
    plain = [aten.mm.default, aten.permute.default, prims.convert_element_type.default]
    assert products_of(graph_of("cuda", read_again=True)) == plain
    assert products_of(graph_of("cuda", leaves=False)) == [*plain, aten.neg.default]
    assert products_of(graph_of("cpu")) == plain  # of which torch has no such product


@pytest.mark.parametrize("has_product", [True, False])
def test_blocks_are_compiled_without_the_change_where_torch_has_no_such_product(
    monkeypatch: pytest.MonkeyPatch, has_product: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **how: asked.append(how.get("options")))
    lacks = {} if has_product else {compiling.FP32_GRADIENTS: "no product"}
    monkeypatch.setattr(compiling, "what_inductor_lacks", lambda: lacks)
    block = nn.Identity()
    block.fp32_gradients_of_products = True  # type: ignore[assignment]
    compiling.compiled_forward(block, block.forward, "block")
    assert asked == [{"post_grad_custom_post_pass": gradients_of_products()} if has_product else None]
    assert len(compiling.notes_on_compiling()) == len(lacks)
