import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cross_entropy_errors import Case, Results, assert_within, exact_and_bounds, make_case
from tests.unit.test_cross_entropy import results_of
from torch import Tensor

from steplab.lab.measuring import measure
from steplab.ops import triton_places
from steplab.ops.cross_entropy import linear_cross_entropy
from steplab.ops.triton_places import chunk_tokens, padded_entries
from steplab.plan.memory import predict_memory
from steplab.specs.resolve import resolve_step
from steplab.units import MIB

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(case: Case, dtype: torch.dtype, implementation: str = "fused", **options: Any) -> Results:
    found = results_of(case, implementation)
    tokens = len(case.targets)
    chunks = -(-tokens // max(chunk_tokens(tokens, len(case.weight), dtype.itemsize), 1))
    assert_within(found, *exact_and_bounds(case, dtype, num_chunks=chunks, **options))
    return found


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "entries"),
    [(300, 64, 50_257), (257, 128, 32_768), (1, 64, 8193), (64, 72, 100), (33, 8, 1), (128, 256, 131_072)],
)
def test_results_are_as_near_to_float64_as_the_format_allows(
    tokens: int, width: int, entries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_places, "CHUNK_BYTES", 100 * padded_entries(entries) * dtype.itemsize)
    check(make_case(tokens, width, entries, dtype=dtype, device="cuda"), dtype)
    options: dict[str, Any] = {"bias": True, "ignored": 0.3, "label_smoothing": 0.1, "z_loss": 1e-3}
    check(make_case(tokens, width, entries, dtype=dtype, device="cuda", reduction="sum", **options), dtype)


@pytest.mark.parametrize("implementation", ["fused", "chunked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_gradient_of_a_float32_weight_is_summed_in_float32(
    implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_places, "CHUNK_BYTES", 64 * padded_entries(10_000) * 2)
    case = make_case(256, 64, 10_000, dtype=torch.float32, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        found = check(case, dtype, implementation, gradient_of_weight=torch.float32)
    assert {result.dtype for result in found.values()} == {torch.float32}


def test_results_are_the_same_every_time() -> None:
    case = make_case(4096, 512, 50_257, dtype=torch.bfloat16, device="cuda")
    first, second = results_of(case, "fused"), results_of(case, "fused")
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- memory ---------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], None]) -> int:
    run()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_memory_is_bounded_by_a_formula(precision: str) -> None:
    """For 8192 tokens of width 4096 and 131,072 entries: the gradients, 512 MiB of logits and little else."""
    tokens, width, entries = 8192, 4096, 131_072
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    hidden = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(entries, width, device="cuda", dtype=dtype).mul_(0.02).requires_grad_()
    targets = torch.randint(entries, (tokens,), device="cuda")

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "autocast"):
            loss = linear_cross_entropy(hidden, weight, targets, implementation="fused")
        loss.backward()
        hidden.grad = weight.grad = None

    inputs_in_bf16 = (hidden.numel() + weight.numel()) * 2 if precision == "autocast" else 0
    beyond = peak_bytes(run) - hidden.nbytes - weight.nbytes - inputs_in_bf16
    assert 512 * MIB <= beyond <= (512 + 64) * MIB  # cuBLAS may take some for itself


# --- what torch does around it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_compiler_gives_the_same(mode: str) -> None:
    case = make_case(256, 64, 10_000, dtype=torch.bfloat16, device="cuda")
    expected = results_of(case, "fused")

    @torch.compile(fullgraph=True, mode=mode)
    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 1, weight, case.targets, implementation="fused")

    for _ in range(3):
        hidden, weight = (x.detach().clone().requires_grad_() for x in (case.hidden, case.weight))
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(hidden, weight)
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        found = {"hidden": hidden.grad, "weight": weight.grad}
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=0)
        # The sum of 256 losses is left to the compiler, which adds in an order of its own.
        torch.testing.assert_close(loss.detach(), expected["loss"], rtol=1e-6, atol=0)


def test_a_step_is_captured_as_a_cuda_graph() -> None:
    """Nothing waits for the GPU: neither the number of targets nor the loss's gradient is read."""
    case = make_case(512, 64, 10_000, dtype=torch.bfloat16, device="cuda", ignored=0.2)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()

    def step() -> Tensor:
        loss = linear_cross_entropy(hidden, weight, case.targets, implementation="fused") / 2
        loss.backward()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        hidden.grad = weight.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    others = make_case(512, 64, 10_000, dtype=torch.bfloat16, device="cuda", ignored=0.6, seed=1)
    with torch.no_grad():
        hidden.copy_(others.hidden)
        weight.copy_(others.weight)
        case.targets.copy_(others.targets)
    graph.replay()
    assert hidden.grad is not None
    assert weight.grad is not None
    found = {"loss": 2 * loss, "hidden": 2 * hidden.grad, "weight": 2 * weight.grad}
    expected = results_of(others, "fused")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_the_memory_of_a_step_is_predicted(precision: str, tmp_path: Path) -> None:
    fields: dict[str, object] = {
        "model": "small", "model.num_layers": 2, "model.vocab_size": 50_257, "batch": 16, "context": 512,
        "attention": "sdpa", "precision": precision, "loss": "fused", "warmup": 2, "steps": 3, "device": "cuda",
    }  # fmt: skip
    run = measure(resolve_step(fields), store=tmp_path / "store.db")
    assert run.failure is None, run.failure
    assert run.memory is not None
    measured = max(peak.peak_allocated_bytes for peak in run.memory.peaks)
    predicted = predict_memory(resolve_step(fields | {"device": "auto"}), device=torch.cuda.get_device_name())
    assert abs(predicted.peak_bytes / measured - 1) <= 0.002
