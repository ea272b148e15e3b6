"""ops/columns.py: the groups and gradients of Tensor.split, and what Inductor makes of the joined gradient."""

import pytest
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer, ConcatKernel, NonOwningLayout
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from steplab.ops.columns import columns, lower_join

WIDTHS = (3, 2, 4)


def weighed(x: Tensor, *, by_columns: bool) -> Tensor:
    first, second, third = columns(x, WIDTHS) if by_columns else x.split(WIDTHS, -1)
    return (first.exp() * third[..., :3]).sum() + (second * third[..., 2:]).sum()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_groups_and_gradients_are_those_of_split(compiled: bool) -> None:
    asked = torch.compile(weighed, fullgraph=True, backend="aot_eager") if compiled else weighed
    ours, theirs = (torch.linspace(-1, 1, 2 * 9).view(2, 9).requires_grad_() for _ in range(2))
    loss, expected = asked(ours, by_columns=True), weighed(theirs, by_columns=False)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_inductor_computes_each_group_in_its_place() -> None:
    """Not behind masks in one kernel, and not beside its place to be copied there."""
    lower_join()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.steplab.join([x.sin(), x.cos()]) @ weight

    with FakeTensorMode() as fakes:
        inputs = torch.randn(4, 16), torch.randn(32, 8)
        lowering = GraphLowering(make_fx(product)(*inputs))
        with V.set_graph_handler(lowering), V.set_fake_mode(fakes):
            lowering.run(*inputs)
    [joined] = [buffer for buffer in lowering.buffers if isinstance(buffer, ConcatKernel)]
    computed = [buffer.layout for buffer in lowering.buffers if isinstance(buffer, ComputedBuffer)]
    places = [layout for layout in computed if isinstance(layout, NonOwningLayout)]
    assert len(computed) == len(places) == 2
    assert [place.view.get_layout().offset for place in places] == [0, 16]
    assert [str(size) for size in joined.get_size()] == ["4", "32"]
