import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from tests.first import first
from tests.stored_records import stored
from tests.sure import sure
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import steplab
from steplab.costs.rates import gpu_named
from steplab.model import compiling
from steplab.model.build import build_workload
from steplab.model.gradient_products import GradientsOfProducts, gradients_of_products
from steplab.model.workload import call
from steplab.ops import block_kernels
from steplab.ops import rms_norm as norm_api
from steplab.ops.columns import columns, lower_join
from steplab.ops.errors import Unsupported, UserError
from steplab.ops.rms_norm import add_rms_norm, plain_add_rms_norm
from steplab.ops.rotary_heads import plain_rotary_heads, rotary_heads
from steplab.ops.swiglu import plain_swiglu, swiglu
from steplab.plan.dry_run.events import Allocated, Began, Event, Freed
from steplab.plan.dry_run.sizes import Count
from steplab.plan.dry_run.step import dry_step, operators_of
from steplab.plan.memory import predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.run import Run
from steplab.specs.resolve import resolve_step
from steplab.specs.step import StepSpec

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (where there is a GPU, tests/gpu)"
)

Function = Callable[..., Sequence[Tensor]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
FEW_ROUNDINGS = 4 * torch.finfo(torch.float32).eps
"""Relative error of a few float32 operations, or of a GPU's exponential and division, each at most two units in the
last place off (PTX ISA, ex2.approx and div.full). The reference may be exact for few elements.
"""
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")
TINY = {
    "model": "tiny", "batch": 2, "context": 5, "device": "cpu", "attention": "sdpa", "model.projections": "merged",
    "model.d_model": 48, "model.num_heads": 4, "model.d_ff": 70, "model.vocab_size": 60, "model.num_layers": 2,
}  # fmt: skip


# --- against float64 ------------------------------------------------------------------------------------------------


def outputs_and_gradients(function: Function, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    given = [weight.to(output.dtype) for weight, output in zip(weights, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, given)]


def assert_near_float64(function: Function, reference: Function, inputs: Sequence[Tensor], *, like: Function) -> None:
    """Each result is as near to float64 as its format allows: as far off as the float32 reference, on either side, then
    rounded (cut off in Triton's interpreter).
    """
    weights = [torch.randn_like(output) for output in like(*inputs)]
    found = outputs_and_gradients(function, inputs, weights)
    exact = outputs_and_gradients(reference, [x.double() for x in inputs], [x.double() for x in weights])
    in_fp32 = outputs_and_gradients(reference, [x.float() for x in inputs], [x.float() for x in weights])
    for number, (ours, wanted, wide) in enumerate(zip(found, exact, in_fp32, strict=True)):
        numbers = torch.finfo(ours.dtype)
        rounding = (numbers.eps if ours.is_cpu else numbers.eps / 2) + FEW_ROUNDINGS
        bound = rounding * wanted.abs() + numbers.smallest_normal + 2 * (wide.double() - wanted).abs().max()
        assert ((ours.double() - wanted).abs() <= bound).all(), f"result {number}"
    again = outputs_and_gradients(function, inputs, weights)
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", first(2, DTYPES))
@pytest.mark.parametrize("shape", [(3, 14), (5, 1, 1030), (40, 2)], ids=str)
def test_swiglu_is_as_near_to_float64_as_the_format_allows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_swiglu(shape, dtype)


def check_swiglu(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(shape, dtype=dtype, device=device)
    assert_near_float64(lambda x: [swiglu(x)], lambda x: [plain_swiglu(x)], [x], like=lambda x: [plain_swiglu(x)])


@pytest.mark.parametrize("dtype", first(2, DTYPES))
@pytest.mark.parametrize("sizes", [(2, 5, 3, 1, 10), (1, 40, 4, 2, 16), (2, 3, 1, 1, 2)], ids=str)
def test_heads_are_as_near_to_float64_as_the_format_allows(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_heads(sizes, dtype)


def check_heads(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(0)
    batch, context, heads, kv_heads, head_dim = sizes
    merged = torch.randn(batch, context, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    angles = 6 * torch.rand(context + 3, head_dim // 2, device=device)
    table = torch.stack((angles.cos(), angles.sin()))[:, :context]  # the first positions of a longer table

    def plain(x: Tensor) -> Sequence[Tensor]:
        return plain_rotary_heads(x, table.to(x.dtype) if x.dtype == torch.float64 else table, heads)

    assert_near_float64(lambda x: rotary_heads(x, table, heads), plain, [merged], like=plain)


@pytest.mark.parametrize("dtype", first(2, DTYPES))
@pytest.mark.parametrize("stream", ["fp32", "the same"])
@pytest.mark.parametrize("shape", first(2, [(3, 7), (2, 5, 130), (1, 40)]), ids=str)
def test_norms_are_as_near_to_float64_as_the_format_allows(
    shape: tuple[int, ...], stream: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_api, "NUM_PROGRAMS", 4)  # fewer than rows, so that some have several
    check_norms(shape, torch.float32 if stream == "fp32" else dtype, dtype)


def check_norms(shape: tuple[int, ...], wide: torch.dtype, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=wide, device=device),
        torch.randn(shape, dtype=dtype, device=device),
        torch.randn(shape[-1], dtype=wide, device=device),
    ]
    rounded = add_rms_norm(inputs[0], inputs[1], inputs[2], 1e-5)[1].double()
    exact = inputs[0].double() + inputs[1].double()
    assert ((rounded - exact).abs() <= torch.finfo(wide).eps * exact.abs()).all()

    def plain(x: Tensor, branch: Tensor, weight: Tensor) -> Sequence[Tensor]:
        # The norm uses the sum as stored in memory.
        total = x + branch
        total = total + (rounded.to(total.dtype) - total).detach()
        return plain_add_rms_norm(total, torch.zeros_like(total), weight, 1e-5)

    def like(*inputs: Tensor) -> Sequence[Tensor]:
        normed, total = plain(*inputs)
        return normed.to(dtype), total

    assert_near_float64(
        lambda x, branch, weight: add_rms_norm(x, branch, weight, 1e-5, dtype=dtype), plain, inputs, like=like
    )


def test_gradients_come_in_any_order_of_memory() -> None:
    torch.manual_seed(0)
    merged = torch.randn(2, 6, 5 * 4, requires_grad=True)
    table = torch.stack((torch.rand(6, 2).cos(), torch.rand(6, 2).sin()))
    gradients = [torch.randn(2, 4, 6, heads).permute(0, 3, 2, 1) for heads in (3, 1, 1)]  # no dimension as expected
    (found,) = torch.autograd.grad(rotary_heads(merged, table, 3), merged, gradients)
    (wanted,) = torch.autograd.grad(plain_rotary_heads(merged, table, 3), merged, gradients)
    torch.testing.assert_close(found, wanted)
    x = torch.randn(3, 8, requires_grad=True)
    (found,) = torch.autograd.grad(swiglu(x), x, torch.ones(1, 1).expand(3, 4))
    (wanted,) = torch.autograd.grad(plain_swiglu(x), x, torch.ones(3, 4))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("used", [0, 1])
def test_a_norm_or_a_sum_that_nothing_reads_has_no_gradient(used: int) -> None:
    torch.manual_seed(0)
    x, branch, weight = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True), torch.rand(6)
    found = torch.autograd.grad(add_rms_norm(x, branch, weight, 1e-5)[used].square().sum(), (x, branch))
    wanted = torch.autograd.grad(plain_add_rms_norm(x, branch, weight, 1e-5)[used].square().sum(), (x, branch))
    torch.testing.assert_close(found, wanted)


def test_a_weight_whose_norm_nothing_reads_has_no_gradient() -> None:
    """None, as with torch's operators: an optimizer skips it, but would decay zeros."""
    x, weight = torch.randn(4, 6).bfloat16().requires_grad_(), torch.rand(6, requires_grad=True)
    add_rms_norm(x, torch.randn(4, 6), weight, 1e-5)[1].sum().backward()
    assert weight.grad is None
    assert torch.equal(sure(x.grad), torch.ones_like(x))


def test_what_the_kernels_do_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"equal widths side by side, not \[2, 3\]"):
        swiglu(torch.zeros(2, 3))
    with pytest.raises(UserError, match=r"not \[1, 2, 12\] and \[2, 2, 2\] of torch.float32 with 2 heads"):
        rotary_heads(torch.zeros(1, 2, 12), torch.zeros(2, 2, 2), 2)
    for table, num_heads in (
        (torch.zeros(2, 2), 1),  # read as two positions, past the end
        (torch.zeros(1, 2, 2), 1),
        (torch.zeros(2, 2, 0), 1),
        (torch.zeros(2, 1, 2), 1),
        (torch.zeros(2, 2, 2, 1), 1),
        (torch.zeros(2, 2, 3), 0),
        (torch.zeros(2, 2, 2, dtype=torch.float64), 1),
    ):
        with pytest.raises(UserError, match="a float32 table"):
            rotary_heads(torch.zeros(1, 2, 12), table, num_heads)
    with pytest.raises(UserError, match=r"not \[2, 3\], \[2, 4\] and \[3\]"):
        add_rms_norm(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(3), 1e-5)
    with pytest.raises(UserError, match=r"not \[\], \[\] and \[\]"):
        add_rms_norm(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0), 1e-5)
    with pytest.raises(Unsupported, match=r"rotary_heads with a trained table .*plain_rotary_heads"):
        rotary_heads(torch.zeros(1, 2, 12), torch.zeros(2, 2, 2, requires_grad=True), 1)
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(Unsupported, match=f"swiglu in {str(dtype).removeprefix('torch.')}"):
            swiglu(torch.zeros(2, 4, dtype=dtype))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unsupported, match="swiglu on cpu"):
        swiglu(torch.zeros(2, 4))
    with pytest.raises(steplab.Unsupported, match=r"block_ops triton on cpu .*use --block-ops plain"):
        build_workload(step(), CPU)


@pytest.mark.parametrize(
    "function",
    [
        swiglu,
        lambda x: add_rms_norm(x, x, torch.ones(8), 1e-5)[0],
        lambda x: rotary_heads(x.unflatten(0, (2, 3)).repeat(1, 1, 3), torch.rand(2, 3, 4), 1)[0],
    ],
    ids=["swiglu", "add_rms_norm", "rotary_heads"],
)
def test_derivatives_that_they_do_not_have_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6, 8, requires_grad=True)
    with pytest.raises(Unsupported, match=r"the second derivative of .* use steplab\.ops"):
        torch.autograd.grad(function(x).sum(), x, create_graph=True)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(Unsupported, match="forward-mode differentiation of"):
        function(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones(6, 8)))
    with pytest.raises(Unsupported, match=r"torch\.func\.grad of .* is autograd's alone .* use steplab\.ops"):
        torch.func.grad(lambda x: function(x).sum())(x.detach())


def test_they_are_operators_as_torch_expects_them() -> None:
    x, table = torch.randn(2, 3, 20, requires_grad=True), torch.rand(2, 3, 2)
    norm = (x, torch.randn(2, 3, 20, dtype=torch.bfloat16, requires_grad=True), torch.rand(20, requires_grad=True))
    for operator, arguments in (
        (torch.ops.steplab.swiglu.default, (x,)),
        (torch.ops.steplab.rotary_heads.default, (x, table, 3)),
        (torch.ops.steplab.add_rms_norm.default, (*norm, 1e-5, torch.bfloat16)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=CHECKS)


@pytest.mark.release
def test_compiled_for_any_size_they_give_the_same() -> None:
    table, weight = torch.rand(2, 9, 4), torch.rand(48, requires_grad=True)

    def all_of_them(x: Tensor) -> Tensor:
        normed, total = add_rms_norm(x, x, weight, 1e-5)
        q, k, v = rotary_heads(normed, table, 2)
        return torch.cat([each.transpose(1, 2).flatten(2) for each in (q, k, v)], -1) + swiglu(total.repeat(1, 1, 2))

    compiled = torch.compile(all_of_them, backend="aot_eager", dynamic=True, fullgraph=True)
    for context in (3, 7):
        x = torch.randn(2, context, 48, requires_grad=True)
        found, wanted = (torch.autograd.grad(each(x).square().sum(), (x, weight)) for each in (compiled, all_of_them))
        torch.testing.assert_close(found, wanted)


# --- in the model ---------------------------------------------------------------------------------------------------


def step(**fields: object) -> StepSpec:
    return resolve_step(TINY | {"block_ops": "triton"} | fields)


def gradients_of(spec: StepSpec, *, double: bool = False, compiled: bool = False) -> dict[str, Tensor]:
    workload = build_workload(spec, torch.device(spec.device))
    assert workload.module is not None
    module, batch = workload.module, sure(workload.make_batch)()
    module = module.double() if double else module
    if compiled:
        torch._dynamo.reset()
        for block in module.blocks:  # type: ignore[union-attr]
            block.forward = torch.compile(block.forward, backend="aot_eager")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    with torch.autocast(spec.device, dtype=low.get(spec.precision), enabled=spec.precision in low):
        loss = call(module, batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | gradients


def largest_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "variant",
    first(1, [{"model.num_kv_heads": 2, "model.biases": "all", "model.head": "tied", "loss": "fused"}, {}]),
    ids=str,
)
def test_a_model_of_fused_blocks_is_the_plain_model(variant: dict[str, object], precision: str) -> None:
    check_model(variant | {"precision": precision})


def check_model(fields: dict[str, object], device: str = "cpu") -> None:
    fields = fields | {"device": device}
    plainest = {"block_ops": "plain", "loss": "plain", "attention": "plain", "precision": "fp32"}
    exact = gradients_of(step(**fields | plainest), double=True)
    plain = largest_error(gradients_of(step(**fields | {"block_ops": "plain"})), exact)
    fused = largest_error(gradients_of(step(**fields)), exact)
    assert fused <= 2 * plain


def test_recomputed_and_compiled_blocks_give_the_same_bits() -> None:
    eager = gradients_of(step(precision="bf16"))
    recomputed = gradients_of(step(precision="bf16", checkpointing="selective"))
    for other in (recomputed, gradients_of(step(precision="bf16"), compiled=True)):
        assert all(torch.equal(eager[name], other[name]) for name in eager)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model.projections": "separate"}, "separate projections.*use --model.projections merged"),
        ({"model.norm": "layernorm"}, "for RMSNorm, SwiGLU and rotary embedding"),
        ({"model.feed_forward": "gelu"}, "for RMSNorm, SwiGLU and rotary embedding"),
        ({"model.learned_positions": 16}, "for RMSNorm, SwiGLU and rotary embedding"),
        ({"layout": "fsdp=2"}, "layout fsdp=2.*use dp=2"),
        ({"device": "mps"}, "device mps"),
    ],
)
def test_steps_that_it_does_not_serve_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(steplab.Unsupported, match=f"(?s)block_ops triton with .*{said}"):
        step(**fields)


# --- in the plan ----------------------------------------------------------------------------------------------------


SCALARS = 64
"""Bytes below which CPU operators allocate for themselves."""


class NothingMade:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


def peaks(changes: Sequence[int]) -> tuple[int, int]:
    sums = list(accumulate(change for change in changes if abs(change) >= SCALARS))
    return max(sums), sums[-1]


def test_an_eager_step_allocates_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for name in vars(block_kernels) if name.endswith("_kernel")):
        monkeypatch.setattr(block_kernels, name, NothingMade())
    spec = step(**{"pass": "forward_backward", "attention": "plain"})
    workload = build_workload(spec, CPU)
    assert workload.module is not None
    model, batch = workload.module, sure(workload.make_batch)()
    found: list[list[int]] = []
    for _ in range(2):  # the first makes what is only made once
        model.zero_grad()
        found.clear()
        loss: Tensor | None = None
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                if loss is None:
                    loss = call(model, batch)
                else:
                    loss.backward()
            events = profiler.profiler.kineto_results.events()
            found.append([event.nbytes() for event in events if event.name() == "[memory]"])

    planned: dict[str, list[int]] = {}

    def listen(event: Event) -> None:
        if isinstance(event, Began):
            planned[event.phase] = []
        elif isinstance(event, Allocated | Freed):
            change = event.piece.num_bytes if isinstance(event, Allocated) else -event.piece.num_bytes
            planned[list(planned)[-1]].append(change)

    with dry_step(spec, Count(0, ""), listen) as run_dry:
        run_dry()
    assert peaks(found[0]) == peaks(planned["forward"])
    assert peaks(found[1])[0] == peaks(planned["backward"])[0]


def test_measured_peaks_are_predicted() -> None:
    runs = stored("block_ops_h200", Run)
    assert [run.spec.block_ops for run in runs if run.spec].count("triton") == 2
    for run in runs:
        assert run.spec is not None
        assert run.memory is not None
        peak = sure(run.memory.peak("step"))
        found = predict_memory(run.spec, device="NVIDIA H200").peak_bytes
        assert found == pytest.approx(peak.peak_allocated_bytes, rel=0.01)


def test_steps_that_wait_for_python_without_a_graph_are_predicted() -> None:
    runs = [*stored("walk_h200", Run), *stored("host_pace_h200", Run)]
    alone = {"block_ops": "triton", "compile": "block", "cuda_graph": "off"}
    found = []
    for run in runs:
        spec = sure(run.spec)
        if spec.model.name == "xl" and all(getattr(spec, name) == value for name, value in alone.items()):
            time, measured_s = predict_step_time(spec, gpu_named("H200 SXM")), sure(run.median_s)
            assert time.low_s <= measured_s <= time.high_s
            found.append(time.central_s / measured_s - 1)
    assert found == [pytest.approx(-0.1, abs=0.05), pytest.approx(-0.24, abs=0.05)]


def test_the_plan_knows_the_kernels() -> None:
    operators = operators_of(step(precision="bf16", compile="block", **{"model.num_layers": 3}))
    counts = {name: sum(op.name == name for op in operators) for name in ("add_rms_norm", "rotary_heads", "swiglu")}
    assert counts == {"add_rms_norm": 2 * 3 + 1, "rotary_heads": 3, "swiglu": 3}
    tokens, width, inner = 2 * 5, 48, 70
    moved = {op.name: op.read_bytes + op.written_bytes for op in operators}
    assert moved["swiglu"] == 2 * 3 * tokens * inner
    assert moved["swiglu_backward"] == 2 * 5 * tokens * inner
    assert moved["rotary_heads"] == 2 * 6 * tokens * width + 4 * 5 * (width // 4)
    assert moved["add_rms_norm"] == (4 + 2 + 2 + 4) * tokens * width + 4 * tokens + 4 * width


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
    from torch._inductor.graph import GraphLowering  # takes seconds, and the other tests do without
    from torch._inductor.ir import ComputedBuffer, ConcatKernel, NonOwningLayout
    from torch._inductor.virtualized import V

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


aten, prims = torch.ops.aten, torch.ops.prims


def graph_of(device: str, *, read_again: bool = False, leaves: bool = True) -> fx.Graph:
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
    assert products_of(graph_of("cpu")) == plain  # torch lacks this product there


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
