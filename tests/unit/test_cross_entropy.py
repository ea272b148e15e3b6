import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.cross_entropy_errors import Case, Results, assert_within, exact_and_bounds, make_case
from tests.first import first
from tests.sure import sure
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from steplab.ops import cross_entropy_chunks, triton_places
from steplab.ops.cross_entropy import linear_cross_entropy
from steplab.ops.cross_entropy_chunks import OPERATORS, Terms, losses_in_chunks, plain_rows
from steplab.ops.errors import Unsupported, UserError
from steplab.ops.triton_places import CHUNK_BYTES, chunk_tokens, padded_entries, whole_entries

INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
IN_CHUNKS = ["chunked", pytest.param("fused", marks=INTERPRETED)]
ALL = ["plain", *IN_CHUNKS]


def bounds_for(
    case: Case, implementation: str, dtype: torch.dtype, *, num_chunks: int = 1, **options: Any
) -> tuple[Results, Results]:
    truncated = implementation == "fused" and dtype == torch.bfloat16
    return exact_and_bounds(case, dtype, num_chunks=num_chunks, truncated=truncated, **options)


@pytest.fixture
def tokens_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_it(count: int, num_entries: int, dtype: torch.dtype) -> None:
        monkeypatch.setattr(triton_places, "CHUNK_BYTES", count * padded_entries(num_entries) * dtype.itemsize)

    return set_it


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 512 columns keep rows of several blocks fast in the interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(cross_entropy_chunks, "BLOCK", 512)


def results_of(case: Case, implementation: str) -> Results:
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    hidden, weight, bias = leaves
    assert hidden is not None
    assert weight is not None
    loss = linear_cross_entropy(
        hidden,
        weight,
        case.targets,
        bias,
        reduction=case.reduction,  # type: ignore[arg-type]
        ignore_index=case.ignore_index,
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
        implementation=implementation,
    )
    weights = None if case.weights_of_losses is None else case.weights_of_losses.to(loss.dtype)
    loss.backward(weights)
    names = zip(("hidden", "weight", "bias"), leaves, strict=True)
    found = {name: leaf.grad for name, leaf in names if leaf is not None and leaf.grad is not None}
    return {"loss": loss.detach(), **found}


# --- against float64 ------------------------------------------------------------------------------------------------

SHAPES = [
    # tokens, width, entries, tokens in a chunk
    (7, 24, 1300, 4),  # two blocks and a rest; the last chunk is not full
    (8, 16, 1024, 4),  # blocks and chunks come out even
    (1, 8, 70, 4),
    (5, 8, 513, 16),  # fewer tokens than a chunk has; a rest of one column
    (3, 8, 1, 1),
]


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("implementation", IN_CHUNKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", first(2, [torch.float32, torch.bfloat16, torch.float16]))
def test_results_are_as_near_to_float64_as_the_format_allows(
    implementation: str, shape: tuple[int, int, int, int], dtype: torch.dtype, tokens_in_a_chunk: Any
) -> None:
    *sizes, tokens = shape
    tokens_in_a_chunk(tokens, sizes[2], dtype)
    for options in ({}, {"bias": True, "ignored": 0.4, "label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "sum"}):
        case = make_case(*sizes, dtype=dtype, **options)  # type: ignore[arg-type]
        expected = bounds_for(case, implementation, dtype, num_chunks=-(-sizes[0] // tokens))
        assert_within(results_of(case, implementation), *expected)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("implementation", IN_CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_without_a_reduction_have_a_gradient_each(
    implementation: str, dtype: torch.dtype, tokens_in_a_chunk: Any
) -> None:
    tokens_in_a_chunk(4, 600, dtype)
    case = make_case(9, 12, 600, dtype=dtype, reduction="none", ignored=0.2, z_loss=1e-2, label_smoothing=0.05)
    assert_within(results_of(case, implementation), *bounds_for(case, implementation, dtype, num_chunks=3))


@pytest.mark.parametrize("implementation", IN_CHUNKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_gradient_of_a_float32_weight_is_summed_in_float32(
    implementation: str, dtype: torch.dtype, tokens_in_a_chunk: Any
) -> None:
    tokens_in_a_chunk(2, 300, dtype)
    case = make_case(8, 16, 300, dtype=torch.float32, ignored=0.2)
    with torch.autocast("cpu", dtype=dtype):
        found = results_of(case, implementation)
    assert {result.dtype for result in found.values()} == {torch.float32}
    expected = bounds_for(case, implementation, dtype, num_chunks=4, gradient_of_weight=torch.float32)
    assert_within(found, *expected)


@pytest.mark.parametrize("implementation", IN_CHUNKS)
def test_small_gradients_in_fp16_are_not_lost_before_a_loss_scale_is_multiplied_into_them(implementation: str) -> None:
    case = make_case(64, 8, 64, dtype=torch.float16)
    case.weight.mul_(2.0**-8)
    hidden = case.hidden.clone().requires_grad_()
    scale = 2.0**14
    (linear_cross_entropy(hidden, case.weight, case.targets, implementation=implementation) * scale).backward()
    exact, bounds = exact_and_bounds(case, torch.float16)
    assert exact["hidden"].abs().median() < torch.finfo(torch.float16).smallest_normal
    rounded_last = torch.finfo(torch.float16).eps / 2 * exact["hidden"].abs() * scale
    off = (sure(hidden.grad).double() - exact["hidden"] * scale).abs()
    assert (off <= bounds["hidden"] * scale + rounded_last).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gradients_of_the_reference_are_those_of_differences(
    reduction: Any, with_bias: bool, tokens_in_a_chunk: Any
) -> None:
    tokens_in_a_chunk(2, 9, torch.float64)
    case = make_case(5, 4, 9, dtype=torch.float64, bias=with_bias, ignored=0.3)
    inputs = [x.requires_grad_() for x in (case.hidden, case.weight, case.bias) if x is not None]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, case.targets, bias, reduction=reduction, label_smoothing=0.1, z_loss=0.1
        )

    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_gradient_asked_for_gives_the_same_loss(implementation: str, reduction: str) -> None:
    case = make_case(6, 8, 40, dtype=torch.float32, reduction=reduction, ignored=0.3, z_loss=0.1)
    found = results_of(case, implementation)["loss"]
    with torch.no_grad():
        again = linear_cross_entropy(
            case.hidden.requires_grad_(), case.weight, case.targets,
            reduction=reduction, z_loss=0.1, implementation=implementation,  # type: ignore[arg-type]
        )  # fmt: skip
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    exact, bounds = exact_and_bounds(case, torch.float32)
    assert_within({"loss": found}, exact, bounds)


@pytest.mark.parametrize("implementation", IN_CHUNKS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_targets_need_not_lie_side_by_side(implementation: str, reduction: str) -> None:
    case = make_case(6, 8, 40, dtype=torch.float32, reduction=reduction)
    for apart in (torch.stack((case.targets, case.targets.flip(0)), 1)[:, 0], case.targets[:1].expand(6)):
        found = results_of(replace(case, targets=apart), implementation)
        together = results_of(replace(case, targets=apart.clone()), implementation)
        torch.testing.assert_close(found, together, rtol=0, atol=0)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("implementation", IN_CHUNKS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_constant_added_to_the_logits_changes_no_bit(implementation: str, label_smoothing: float) -> None:
    """Softmax and loss depend on differences. These logits are exact in float32 with the constant too."""
    torch.manual_seed(0)
    differences = (torch.randn(1300, 1) * 5 * 2**9).round() / 2**9
    case = make_case(6, 1, 1300, dtype=torch.float32, reduction="none", label_smoothing=label_smoothing)
    case = replace(case, hidden=torch.ones(6, 1), weight=differences)
    found = [
        results_of(replace(case, weight=differences + constant), implementation) for constant in (0.0, 8192.0, -16000.0)
    ]
    for name in ("loss", "weight"):
        assert torch.equal(found[1][name], found[0][name])
        assert torch.equal(found[2][name], found[0][name])


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_an_entry_that_a_bias_excludes_has_the_losses_of_torch(implementation: str, label_smoothing: float) -> None:
    """Its logit is -inf: the loss is inf where it is the target, and with smoothing everywhere."""
    case = make_case(3, 8, 1300, dtype=torch.float32, reduction="none", bias=True, label_smoothing=label_smoothing)
    assert case.bias is not None
    case.bias[case.targets[1]] = -torch.inf
    logits = case.hidden @ case.weight.T + case.bias
    expected = cross_entropy(logits, case.targets, reduction="none", label_smoothing=label_smoothing)
    with torch.no_grad():
        found = linear_cross_entropy(
            case.hidden, case.weight, case.targets, case.bias,
            reduction="none", label_smoothing=label_smoothing, implementation=implementation,
        )  # fmt: skip
    assert found[1] == torch.inf
    torch.testing.assert_close(found, expected)


# --- targets that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ALL)
def test_where_every_target_is_ignored_there_is_no_gradient(implementation: str) -> None:
    for reduction in ("mean", "sum"):
        for dtype in (torch.float32, torch.float16):
            case = make_case(5, 8, 40, dtype=dtype, reduction=reduction, ignored=1.1)
            found = results_of(case, implementation)
            assert found["loss"].isnan() if reduction == "mean" else found["loss"] == 0
            assert not found["hidden"].any()
            assert not found["weight"].any()


@pytest.mark.parametrize("implementation", IN_CHUNKS)
def test_no_tokens_have_no_gradient(implementation: str) -> None:
    found = results_of(make_case(0, 8, 40, dtype=torch.float32, reduction="sum", bias=True), implementation)
    assert found["loss"] == 0
    assert found["hidden"].shape == (0, 8)
    assert not found["weight"].any()
    assert not found["bias"].any()


@pytest.mark.parametrize("implementation", IN_CHUNKS)
def test_the_loss_of_a_target_outside_of_the_vocabulary_is_not_a_number(implementation: str) -> None:
    case = make_case(4, 8, 40, dtype=torch.float32)
    for wrong in (-1, 40, 10**9):
        targets = case.targets.clone()
        targets[1] = wrong
        with torch.no_grad():
            losses = linear_cross_entropy(
                case.hidden, case.weight, targets, reduction="none", implementation=implementation
            )
        assert losses.isnan().tolist() == [False, True, False, False]


# --- what is in memory ----------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest_bytes = self.total_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(x) for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        output = func(*args, **(kwargs or {}))
        for made in torch.utils._pytree.tree_leaves(output):
            if isinstance(made, Tensor) and _memory(made) not in given:
                num_bytes = made.untyped_storage().nbytes()
                self.largest_bytes = max(self.largest_bytes, num_bytes)
                self.total_bytes += num_bytes
        return output


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole_in_memory(dtype: torch.dtype, tokens_in_a_chunk: Any) -> None:
    tokens, width, entries = 64, 4, 1000
    tokens_in_a_chunk(4, entries, dtype)
    case = make_case(tokens, width, entries, dtype=dtype)
    with Allocations() as allocations:
        losses_in_chunks(
            case.hidden, case.weight, None, case.targets, torch.ones(tokens), Terms(-100, 0.1, 0.1),
            dtype=dtype, wanted=(True, True, False), rows=plain_rows,
        )  # fmt: skip
    a_chunk_in_float32 = 4 * padded_entries(entries) * 4
    assert allocations.largest_bytes <= max(a_chunk_in_float32, case.weight.nbytes)
    assert allocations.largest_bytes < tokens * entries * dtype.itemsize / 4


@pytest.mark.parametrize("implementation", IN_CHUNKS)
def test_backward_gives_the_gradients_away_without_a_copy(implementation: str) -> None:
    case = make_case(16, 8, 500, dtype=torch.float32)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, case.targets, implementation=implementation) / 2
    with Allocations() as allocations:
        loss.backward()
    assert allocations.total_bytes < 100  # the gradient of the loss, and that divided
    exact, bounds = exact_and_bounds(case, torch.float32)
    assert_within({"weight": 2 * sure(weight.grad)}, exact, bounds)


def test_chunks_of_the_largest_vocabularies() -> None:
    assert chunk_tokens(8192, 131_072, 2) == 2048
    assert chunk_tokens(8192, 151_936, 2) == 1024
    assert chunk_tokens(512, 10_000, 4) == 512  # all at once
    assert chunk_tokens(10**6, 10**9, 4) == 1
    assert (whole_entries(50_257), whole_entries(10_000), whole_entries(63)) == (50_240, 10_000, 0)
    for entries in (50_257, 131_072, 70, 63):
        assert whole_entries(entries) % 8 == 0
        assert whole_entries(entries) in (entries, padded_entries(entries) - 64)
        assert chunk_tokens(10**6, entries, 2) * padded_entries(entries) * 2 <= CHUNK_BYTES


@pytest.mark.parametrize("frozen", ["hidden", "weight", None])
def test_only_what_is_asked_for_is_computed(frozen: str | None) -> None:
    case = make_case(6, 8, 40, dtype=torch.float32)
    hidden, weight = case.hidden.requires_grad_(frozen != "hidden"), case.weight.requires_grad_(frozen != "weight")
    product = 2 * 6 * 8 * 40
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(hidden, weight, case.targets)
    assert counter.get_total_flops() == (2 if frozen else 3) * product
    loss.backward()
    assert (hidden.grad is None, weight.grad is None) == (frozen == "hidden", frozen == "weight")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        linear_cross_entropy(hidden, weight, case.targets)
    assert counter.get_total_flops() == product


# --- autograd, the compiler, refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IN_CHUNKS)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(implementation: str) -> None:
    case = make_case(6, 8, 40, dtype=torch.float32)
    hidden = case.hidden.requires_grad_()
    loss = 3 * linear_cross_entropy(hidden, case.weight, case.targets, implementation=implementation)
    first, second, last = (torch.autograd.grad(loss, hidden, retain_graph=keep)[0] for keep in (True, True, False))
    assert torch.equal(first, second)
    assert torch.equal(first, last)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torch_func_grad_is_refused(reduction: Any) -> None:
    case = make_case(6, 8, 40, dtype=torch.float32)

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, case.weight, case.targets, reduction=reduction).sum()

    with pytest.raises(Unsupported, match=r"torch\.func\.grad of a chunked loss .* choose plain"):
        torch.func.grad(loss)(case.hidden)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction: Any) -> None:
    case = make_case(6, 8, 40, dtype=torch.float32)
    hidden = case.hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, case.weight, case.targets, reduction=reduction).sum()
    with pytest.raises(Unsupported, match="second derivative of a chunked loss is not supported"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_compiler_sees_one_graph(reduction: Any) -> None:
    case = make_case(6, 8, 40, dtype=torch.float32, reduction=reduction)
    expected = results_of(case, "chunked")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 1, weight, case.targets, reduction=reduction)

    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    loss = loss_of(hidden, weight)
    loss.backward(case.weights_of_losses)
    assert hidden.grad is not None
    assert weight.grad is not None
    found = {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", IN_CHUNKS)
def test_the_operators_are_what_they_are_declared_to_be(implementation: str) -> None:
    check: Any = torch.library.opcheck
    case = make_case(6, 8, 40, dtype=torch.float32, bias=True)
    for scale, wanted in ((torch.ones(6), [True] * 3), (None, [False] * 3), (torch.ones(6), [False, True, False])):
        arguments = (case.hidden, case.weight, case.bias, case.targets, scale, -100, 0.1, 0.1, torch.float32, wanted)
        check(OPERATORS[implementation].losses, arguments, test_utils=("test_schema", "test_faketensor"))
    gradient = (torch.randn(5, 3), torch.tensor(2.0))
    check(OPERATORS[implementation].scale, gradient, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": torch.zeros(6, 7)}, r"takes hidden \[..., C\] and weight \[V, C\], not hidden \[6, 7\]"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "takes a target in int64 for each hidden state"),
        ({"targets": torch.zeros(6, dtype=torch.int32)}, "takes a target in int64 for each hidden state"),
        ({"bias": torch.zeros(3)}, r"takes a bias \[40\], not \[3\]"),
        ({"weight": torch.zeros(40, 8).half()}, "takes tensors of one floating-point type, not float16, float32"),
        ({"reduction": "max"}, "choose one of mean, sum, none"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, not 1.5"),
        ({"implementation": "fast"}, "choose one of plain, chunked, fused"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    given = {"hidden": torch.zeros(6, 8), "weight": torch.zeros(40, 8), "targets": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises(UserError, match=said):
        linear_cross_entropy(**(given | change))


def test_the_kernel_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(3, 8, 40, dtype=torch.float64)
    with pytest.raises(Unsupported, match=r"in float64 is not supported: .* choose chunked or plain"):
        linear_cross_entropy(case.hidden, case.weight, case.targets, implementation="fused")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unsupported, match=r"loss 'fused' on cpu is not supported: .* choose chunked or plain"):
        linear_cross_entropy(case.hidden.float(), case.weight.float(), case.targets, implementation="fused")
