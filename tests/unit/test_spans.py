import math
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from tests.raw_trace import Event, read_events
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from steplab.measurement.step.spans import Spans
from steplab.ops.attention.api import IMPLEMENTATIONS, attention_named
from steplab.ops.attention.plain import plain_attention


@pytest.fixture
def traced(tmp_path: Path) -> Callable[[Callable[[], object]], Event]:
    def run(work: Callable[[], object]) -> Event:
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("everything"):
            work()
        path = tmp_path / "trace.json"
        profiler.export_chrome_trace(str(path))
        (found,) = [event for event in read_events(path) if event.name == "everything"]
        return found

    return run


Traced = Callable[[Callable[[], object]], Event]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.shared = self.layers[0][1]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.shared(x)


def num_hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


# --- off --------------------------------------------------------------------------------------------------


def test_ranges_that_are_off_are_nothing(traced: Traced) -> None:
    spans, model = Spans(nvtx=True), Twice()
    assert spans("a") is spans("b")

    def work() -> None:
        with spans("a"), spans("a"):
            model(torch.ones(1, 4))

    assert num_hooks(model) == 0
    assert traced(work).ranges() == {}


def test_ranges_are_off_again_and_the_hooks_are_gone(traced: Traced) -> None:
    spans, model = Spans(nvtx=False), Twice()
    model.layers[0].register_forward_hook(lambda module, arguments, output: None)
    with spans.on(model):
        assert num_hooks(model) > 1
    assert num_hooks(model) == 1

    def work() -> None:
        with spans("a"):
            model(torch.ones(1, 4))

    assert traced(work).ranges() == {}


def test_a_failure_inside_takes_the_hooks_off_too() -> None:
    spans, model = Spans(nvtx=False), Twice()
    with pytest.raises(RuntimeError), spans.on(model):
        model(torch.ones(1, 5))
    assert num_hooks(model) == 0


# --- on ---------------------------------------------------------------------------------------------------


def test_every_submodule_marks_its_forward_pass_by_its_dotted_name(traced: Traced) -> None:
    spans, model = Spans(nvtx=False), Twice()
    with spans.on(model) as left_out:
        found = traced(lambda: model(torch.ones(1, 4)))
    assert left_out == ()
    assert found.ranges() == {
        "layers.0": {"layers.0.0": {}, "layers.0.1": {}},
        "layers.1": {"layers.1.0": {}, "layers.1.1": {}},
        "layers.0.1": {},  # a module of two names goes by the first
    }
    (product,) = found.named("layers.1")
    assert [event.name for event in product.named("layers.1.0")[0].inside] == ["aten::linear"]


def test_the_hooks_a_module_has_lie_inside_its_range(traced: Traced) -> None:
    spans, model = Spans(nvtx=False), nn.Sequential(nn.Identity())

    def before(module: nn.Module, arguments: object) -> None:
        torch.ones(1).sin()

    def after(module: nn.Module, arguments: object, output: object) -> None:
        torch.ones(1).cos()

    model[0].register_forward_pre_hook(before)
    model[0].register_forward_hook(after)
    with spans.on(model):
        found = traced(lambda: model(torch.ones(1)))
    names = {event.name for event in found.named("0")[0].all()}
    assert {"aten::sin", "aten::cos"} <= names


def test_a_forward_pass_that_raises_ends_its_range(traced: Traced) -> None:
    spans, model = Spans(nvtx=False), Twice()

    def work() -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5))
        model(torch.ones(1, 4))

    with spans.on(model):
        found = traced(work)
    tops = [event.name for event in found.inside if event.kind == "user_annotation"]
    assert tops == ["layers.0", "layers.0", "layers.1", "layers.0.1"]


def test_nvtx_gets_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    spans, model = Spans(nvtx=True), nn.Sequential(nn.Sequential(nn.Identity()))
    with spans.on(model), spans("step"):
        model(torch.ones(1))
    assert log == ["step", "0", "0.0", "pop", "pop", "pop"]
    without = Spans(nvtx=False)
    with without.on(model), without("step"):
        model(torch.ones(1))
    assert len(log) == 6


# --- what hooks would change ------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_is_marked_inside_of_what_is_compiled(traced: Traced, whole: bool) -> None:
    spans = Spans(nvtx=False)
    inner = torch.compile(Twice(), backend="eager")
    assert isinstance(inner, nn.Module)
    model = inner if whole else nn.Sequential(nn.Linear(4, 4), inner, nn.ReLU())
    model(torch.ones(1, 4))
    with spans.on(model) as left_out:
        found = traced(lambda: model(torch.ones(1, 4)))
        assert num_hooks(inner) == 0
    assert left_out == (("",) if whole else ("1",))
    marked = {event.name for event in found.all() if event.name[0].isdigit() or event.name.startswith("layers")}
    assert marked == (set() if whole else {"0", "2"})


def test_nothing_is_marked_inside_of_a_module_compiled_in_place() -> None:
    spans, model = Spans(nvtx=False), nn.Sequential(nn.Linear(4, 4), Twice())
    model[1].compile(backend="eager")
    with spans.on(model) as left_out:
        assert num_hooks(model[1]) == 0
        assert num_hooks(model[0]) == 2
    assert left_out == ("1",)


@pytest.mark.parametrize("training", [False, True])
def test_a_fast_path_that_looks_for_hooks_is_still_taken(traced: Traced, training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer).train(training)
    spans = Spans(nvtx=False)
    with torch.no_grad(), spans.on(model) as left_out:
        found = traced(lambda: model(torch.ones(1, 3, 8)))
    fast = found.named("aten::_transformer_encoder_layer_fwd")
    assert left_out == (() if training else ("0",))
    assert len(fast) == (0 if training else 1)
    assert bool(found.named("0.linear1")) == training


# --- plain attention --------------------------------------------------------------------------------------


def formula(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_marking_the_parts_of_attention_changes_no_bit(marked: bool, causal: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 7, 5, requires_grad=True) for _ in range(3)]
    spans = Spans(nvtx=False)
    with spans.on():
        attend = attention_named("plain", span=spans) if marked else attention_named("plain")
        out = attend(*inputs, causal=causal)
    expected = formula(*inputs, causal=causal)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_the_parts_of_attention_hold_its_operators(traced: Traced) -> None:
    spans = Spans(nvtx=False)
    q = torch.ones(1, 2, 4, 8)
    with spans.on():
        found = traced(lambda: attention_named("plain", span=spans)(q, q, q, causal=True))
    operators = {
        part.name: {event.name for event in part.inside} for part in found.inside if part.kind == "user_annotation"
    }
    assert list(operators) == ["scores", "softmax", "values"]
    assert {"aten::transpose", "aten::matmul", "aten::mul", "aten::triu", "aten::masked_fill"} <= operators["scores"]
    assert operators["softmax"] == {"aten::softmax"}
    assert operators["values"] == {"aten::matmul"} or operators["values"] == {"aten::matmul", "aten::to"}
    assert {event.kind for event in found.inside} == {"user_annotation"}, "an operator in no part"


def test_attention_asks_for_its_parts_in_their_order() -> None:
    asked: list[str] = []

    @contextmanager
    def note(name: str):  # type: ignore[no-untyped-def]
        asked.append(name)
        yield
        asked.append(f"end of {name}")

    def span(name: str) -> AbstractContextManager[object]:
        return note(name)

    q = torch.ones(1, 1, 2, 2)
    plain_attention(q, q, q, span=span)
    assert asked == ["scores", "end of scores", "softmax", "end of softmax", "values", "end of values"]


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
def test_only_plain_attention_is_marked(implementation: str) -> None:
    assert attention_named(implementation) is IMPLEMENTATIONS[implementation]
    is_same = attention_named(implementation, span=Spans(nvtx=False)) is IMPLEMENTATIONS[implementation]
    assert is_same == (implementation != "plain")


def test_attention_without_ranges_is_one_graph_to_a_compiler() -> None:
    compiled = torch.compile(plain_attention, backend="eager", fullgraph=True)
    q = torch.randn(1, 2, 4, 8)
    assert torch.equal(compiled(q, q, q, causal=True), formula(q, q, q, causal=True))
