"""flash_triton on a GPU: a fuzz of shapes against float64, and torch's use of it.

Values that make Triton recompile (types, head columns, mask) are drawn in groups. A hanging kernel ends the process
with a trace.
"""

import faulthandler
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.attention_errors import (
    assert_at_most_twice_the_error_of_plain,
    assert_results_at_most_twice_as_wrong,
    results_of,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from steplab.ops.attention import triton_backward, triton_forward, triton_repeats, triton_tuning
from steplab.ops.attention.api import attention
from steplab.ops.attention.functions import FlashAttentionTriton
from steplab.ops.errors import Unsupported

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HANGS_S = 120
"""Seconds; no test takes a quarter as long."""


@pytest.fixture(autouse=True)
def a_hang_ends_the_process(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    with capfd.disabled():
        terminal = os.fdopen(os.dup(2), "w")
    faulthandler.dump_traceback_later(HANGS_S, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
    terminal.close()


@pytest.fixture
def tf32_put_back() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture(params=["hopper", "portable"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    chosen: str = request.param
    if chosen == "hopper":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the Hopper kernels are for compute capability 9.0")
        if not triton_tuning.hopper_kernels_on(torch.device("cuda", 0)):
            pytest.skip("this Triton does not compile the Hopper kernels")
    else:
        monkeypatch.setattr(triton_tuning, "hopper_kernels_run", lambda head_dim: False)
    choose_anew()
    yield chosen
    monkeypatch.undo()
    choose_anew()


def choose_anew() -> None:
    triton_tuning._found.cache_clear()
    triton_backward._layout.cache_clear()
    triton_backward._starts_of_one_sweep.cache_clear()
    triton_repeats.forget()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    seed: int
    batch: int
    key_heads: int
    sharing: int
    queries: int
    keys: int
    dim: int
    dtype: torch.dtype = BF16
    causal: bool = False
    scale: float | None = None
    layout: str = "contiguous"
    large: float = 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        make = torch.Generator("cuda").manual_seed(self.seed)
        heads = self.key_heads * self.sharing

        def drawn(num_heads: int, rows: int, large: float = self.large, layout: str = self.layout) -> Tensor:
            shape = (self.batch, num_heads, rows, self.dim)
            x = (torch.randn(shape, generator=make, device="cuda") * large).to(self.dtype)
            return laid_out(x, layout)

        q, k, v = drawn(heads, self.queries), drawn(self.key_heads, self.keys), drawn(self.key_heads, self.keys)
        if self.layout == "one gradient for all heads":
            return q, k, v, drawn(1, self.queries, 1).expand(-1, heads, -1, -1)
        if self.layout == "one gradient for all":
            return q, k, v, drawn(1, 1, 1)[:1, :, :, :1].expand(q.shape)
        return q, k, v, drawn(heads, self.queries, 1)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "heads after positions":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "positions first":
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if layout == "every second column":
        return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]
    if layout == "columns before rows":
        return x.mT.contiguous().mT
    if layout == "off by one element":
        room = x.new_full((x.numel() + 1,), float("nan"))
        room[1:] = x.flatten()
        return room[1:].view(x.shape)
    if layout == "part of a wider tensor":
        return torch.cat([x, torch.full_like(x, float("nan"))], -1)[..., : x.shape[-1]]
    if layout == "one batch for all":
        return x[:1].expand(x.shape)
    return x


LAYOUTS = [
    "contiguous",
    "heads after positions",
    "positions first",
    "every second column",
    "columns before rows",
    "off by one element",
    "part of a wider tensor",
    "one batch for all",
    "one gradient for all heads",
    "one gradient for all",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    dims: tuple[int, ...]
    causal: bool
    key_heads: int
    sharing: int
    dtype: torch.dtype = BF16
    tf32: bool = False
    in_pairs: bool = False

    def __str__(self) -> str:
        dtype = "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")
        mask = "causal" if self.causal else "full"
        pairs = "-in_pairs" if self.in_pairs else ""
        return f"{dtype}-{'_'.join(map(str, self.dims))}-{mask}-{self.key_heads}x{self.sharing}{pairs}"


GROUPS = [
    Group(dims=(16, 1, 5), causal=True, key_heads=2, sharing=1),
    Group(dims=(17, 24, 32), causal=False, key_heads=1, sharing=3),
    Group(dims=(33, 50, 64), causal=True, key_heads=2, sharing=2),
    Group(dims=(33, 40, 64), causal=False, key_heads=3, sharing=1),
    Group(dims=(65, 72, 80), causal=True, key_heads=1, sharing=2),
    Group(dims=(65, 77, 80), causal=False, key_heads=2, sharing=1),
    Group(dims=(81, 88, 96), causal=True, key_heads=2, sharing=1),
    Group(dims=(97, 112, 128), causal=True, key_heads=2, sharing=2),
    Group(dims=(100, 120, 128), causal=False, key_heads=3, sharing=1),
    Group(dims=(129, 136, 144), causal=True, key_heads=2, sharing=1),
    Group(dims=(145, 160, 161, 192), causal=False, key_heads=2, sharing=1),
    Group(dims=(193, 200, 256), causal=True, key_heads=1, sharing=2),
    Group(dims=(200, 240, 256), causal=False, key_heads=2, sharing=1),
    Group(dims=(33, 48, 64), causal=True, key_heads=2, sharing=1, dtype=FP16),
    Group(dims=(66, 80), causal=False, key_heads=1, sharing=3, dtype=FP16),
    Group(dims=(99, 128), causal=True, key_heads=1, sharing=2, dtype=FP16),
    Group(dims=(200, 256), causal=True, key_heads=2, sharing=1, dtype=FP16),
    Group(dims=(33, 64), causal=True, key_heads=2, sharing=4, in_pairs=True),
    Group(dims=(48, 64), causal=False, key_heads=1, sharing=2, in_pairs=True),
    Group(dims=(65, 80), causal=True, key_heads=1, sharing=4, in_pairs=True),
    Group(dims=(88, 96), causal=False, key_heads=2, sharing=4, in_pairs=True),
    Group(dims=(100, 128), causal=True, key_heads=2, sharing=2, in_pairs=True),
    Group(dims=(120, 128), causal=False, key_heads=1, sharing=6, dtype=FP16, in_pairs=True),
    Group(dims=(17, 33, 64), causal=False, key_heads=2, sharing=1, dtype=FP32),
    Group(dims=(80, 96, 128), causal=True, key_heads=1, sharing=2, dtype=FP32),
    Group(dims=(200, 256), causal=True, key_heads=2, sharing=1, dtype=FP32),
    Group(dims=(33, 64), causal=True, key_heads=2, sharing=1, dtype=FP32, tf32=True),
    Group(dims=(80, 128), causal=False, key_heads=1, sharing=2, dtype=FP32, tf32=True),
]
CASES_A_GROUP = 14


def length(draw: random.Random) -> int:
    near = draw.choice([64, 128, 192, 256, 384, 512]) + draw.choice([-1, 0, 1])
    return draw.choice([draw.randint(1, 40), draw.randint(1, 300), draw.randint(1, 700), near])


@pytest.fixture
def pairs_as_asked(group: Group) -> Iterator[None]:
    if not group.in_pairs:
        yield
        return
    with patch.object(triton_backward, "heads_in_a_row", return_value=2):
        choose_anew()
        yield
    choose_anew()


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_shapes_at_random_err_at_most_twice_as_much_as_plain(
    group: Group, tf32_put_back: None, pairs_as_asked: None
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = group.tf32
    draw = random.Random(str(group))
    for seed in range(CASES_A_GROUP):
        case = Case(
            seed=seed,
            batch=draw.choice([1, 2, 3]),
            key_heads=group.key_heads,
            sharing=group.sharing,
            queries=length(draw),
            keys=length(draw),
            dim=draw.choice(group.dims),
            dtype=group.dtype,
            causal=group.causal,
            scale=draw.choice([None, None, 0.2, -0.15]),
            layout=draw.choice(LAYOUTS),
            large=draw.choice([1, 1, 3]),
        )
        check(case, tf32=group.tf32)


SHAPE: dict[str, Any] = {"batch": 1, "key_heads": 2, "sharing": 1, "queries": 203, "keys": 261, "dim": 64}


def check(case: Case, *, tf32: bool = False) -> None:
    assert_at_most_twice_the_error_of_plain(
        FlashAttentionTriton, *case.tensors(), causal=case.causal, scale=case.scale, tf32=tf32, case=case
    )


# Batch, heads of keys, sharing, queries, keys.
EDGES = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 300),
    (1, 1, 1, 300, 1),
    (2, 1, 1, 128, 256),
    (1, 2, 1, 256, 64),
    (3, 1, 4, 129, 129),
    (1, 1, 16, 16, 48),
    (17, 1, 1, 1, 15),
    (2, 16, 1, 96, 640),
]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_edges_err_at_most_twice_as_much_as_plain(causal: bool, dtype: torch.dtype) -> None:
    for batch, key_heads, sharing, queries, keys in EDGES:
        shape = SHAPE | {"batch": batch, "key_heads": key_heads, "sharing": sharing, "queries": queries, "keys": keys}
        check(Case(seed=1, causal=causal, dtype=dtype, **shape))


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_both_variants_err_at_most_twice_as_much_as_plain(dim: int, variant: str) -> None:
    assert triton_tuning.tiles_for("forward", torch.empty(1, dim, dtype=BF16, device="cuda"), 513).variant == variant
    for seed, (queries, keys) in enumerate([(513, 513), (65, 513), (513, 65), (63, 31), (200, 129)]):
        for causal in (False, True):
            check(Case(seed=seed, batch=2, key_heads=2, sharing=2, queries=queries, keys=keys, dim=dim, causal=causal))


# --- large numbers, infinities and NaN -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_do_not_overflow(dtype: torch.dtype, causal: bool, variant: str) -> None:
    for seed in range(3):
        check(Case(seed=seed, causal=causal, dtype=dtype, large=30, **SHAPE))


SPECIAL = {
    "a key that no query sees": lambda q, k, v: k[..., 1, :].fill_(float("-inf")),
    "a tile of keys that no query sees": lambda q, k, v: k[..., :128, :].fill_(float("-inf")),
    "no key that a query sees": lambda q, k, v: k.fill_(float("-inf")),
    "a key that outweighs all": lambda q, k, v: k[..., 150, :].fill_(float("inf")),
    "a NaN among the keys": lambda q, k, v: k[..., 1, 0].fill_(float("nan")),
    "a NaN among the queries": lambda q, k, v: q[..., 1, 0].fill_(float("nan")),
    "a NaN among the values": lambda q, k, v: v[..., 1, 0].fill_(float("nan")),
    "an infinite value": lambda q, k, v: v[..., 200, 0].fill_(float("inf")),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_infinities_and_nan_come_out_as_of_torch(case: str, variant: str) -> None:
    q, k, v = (t.abs() + 0.1 for t in Case(seed=1, **SHAPE).tensors()[:3])
    SPECIAL[case](q, k, v)
    found = attention(q, k, v, implementation="flash_triton")
    with sdpa_kernel(SDPBackend.MATH):
        right = scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found, right, equal_nan=True, rtol=2e-2, atol=2e-2)


def test_a_row_that_sees_nothing_gives_nothing_and_gets_no_gradient(variant: str) -> None:
    q, k, v, do = Case(seed=1, **SHAPE).tensors()
    q, k = q.abs() + 0.1, k.abs() + 0.1
    q[..., 1, :] = float("-inf")
    found = results_of(FlashAttentionTriton, q, k, v, do, causal=False)
    assert not found["output"][..., 1, :].any()
    assert (found["log-sum-exp"][..., 1] == float("-inf")).all()
    kept = [row for row in range(203) if row != 1]
    right = results_of(FlashAttentionTriton, q[:, :, kept], k, v, do[:, :, kept], causal=False)
    torch.testing.assert_close(found["dv"], right["dv"], rtol=2e-2, atol=2e-2)


# --- more than 2**31 elements --------------------------------------------------------------------------------------

MANY = 2**24 + 100
"""Rows with more than 2**31 elements in two heads of 64 columns."""
NEEDLES = [0, 1, 777, 2**23 - 1, 2**23, 2**24 - 1, 2**24, 2**24 + 37, MANY - 1]
"""The only rows that contribute."""
needs_room = pytest.mark.skipif(
    torch.cuda.get_device_properties(0).total_memory < 60e9, reason="needs a GPU with 60 GB of memory"
)


@needs_room
def test_more_than_two_to_the_31_elements_of_queries() -> None:
    make = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(1, 2, MANY, 64, generator=make, device="cuda", dtype=BF16)
    k, v = (torch.randn(1, 2, 70, 64, generator=make, device="cuda", dtype=BF16) for _ in range(2))
    do = torch.zeros_like(q)
    do[:, :, NEEDLES] = torch.randn(1, 2, len(NEEDLES), 64, generator=make, device="cuda", dtype=BF16)
    assert q.numel() > 2**31
    found = results_of(FlashAttentionTriton, q, k, v, do, causal=False)
    for name in ("output", "log-sum-exp", "dq"):
        found[name] = found[name][:, :, NEEDLES]
    assert_results_at_most_twice_as_wrong(found, q[:, :, NEEDLES], k, v, do[:, :, NEEDLES], causal=False)


@needs_room
def test_more_than_two_to_the_31_elements_of_keys() -> None:
    make = torch.Generator("cuda").manual_seed(1)
    q, do = (torch.randn(1, 2, 70, 64, generator=make, device="cuda", dtype=BF16) for _ in range(2))
    q = q.abs() + 1
    k = torch.full((1, 2, MANY, 64), -2.0, device="cuda", dtype=BF16)
    v = torch.ones_like(k)
    for x in (k, v):
        x[:, :, NEEDLES] = torch.randn(1, 2, len(NEEDLES), 64, generator=make, device="cuda", dtype=BF16)
    found = results_of(FlashAttentionTriton, q, k, v, do, causal=False, scale=1.0)
    for name in ("dk", "dv"):
        assert found[name][:, :, 2:777].abs().max() < 1e-6
        found[name] = found[name][:, :, NEEDLES]
    few = k[:, :, NEEDLES], v[:, :, NEEDLES]
    assert_results_at_most_twice_as_wrong(found, q, *few, do, causal=False, scale=1.0)


# --- what torch does around it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_heads", [2, 32])
def test_every_run_gives_the_same_bits(variant: str, key_heads: int) -> None:
    """A program of the backward kernel takes two of 2 x 64 query heads in sequence."""
    case = Case(seed=1, batch=2, key_heads=key_heads, sharing=2, queries=1025, keys=1025, dim=128, causal=True)
    first = results_of(FlashAttentionTriton, *case.tensors(), causal=True)
    for _ in range(5):
        again = results_of(FlashAttentionTriton, *case.tensors(), causal=True)
        for name, right in first.items():
            assert torch.equal(again[name], right), f"{name}: {case}"


def loss_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    doubled = FlashAttentionTriton.apply(q * 2, k, v, True)
    return attention(doubled, k, v, causal=True, implementation="flash_triton").float().square().sum()


def inputs(*shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    make = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(shape, generator=make, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def test_a_compiler_goes_through_without_a_break() -> None:
    q, k, v = inputs(2, 2, 130, 64)
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled, loss_of(q, k, v), rtol=1e-2, atol=0)
    right = torch.autograd.grad(loss_of(q, k, v), (q, k, v))
    for found, expected in zip(torch.autograd.grad(compiled, (q, k, v)), right, strict=True):
        assert (found - expected).float().norm() <= 0.02 * expected.float().norm()


def test_a_cuda_graph_replays_it(variant: str) -> None:
    q, k, v = inputs(2, 2, 130, 64)
    do = torch.randn_like(q)
    names = "output", "dq", "dk", "dv"

    def run() -> tuple[Tensor, ...]:
        out = FlashAttentionTriton.apply(q, k, v, True)
        return out, *torch.autograd.grad(out, (q, k, v), do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x in (q, k, v, do):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for name, found, right in zip(names, captured, run(), strict=True):
        assert torch.equal(found, right), name


def test_the_compiler_records_a_graph_of_a_first_call() -> None:
    q, k, v = inputs(2, 3, 190, 64)
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, mode="reduce-overhead")
    for _ in range(3):  # warmed up, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    for got, expected in zip(found, torch.autograd.grad(loss_of(q, k, v), (q, k, v)), strict=True):
        assert (got - expected).float().norm() <= 0.02 * expected.float().norm()


def test_a_first_call_while_a_graph_is_captured_is_refused_in_one_line(variant: str) -> None:
    q, k, v = (x.detach() for x in inputs(1, 3, 77, 64))
    triton_forward._start.cache_clear()
    refused = pytest.raises(Unsupported, match=r"first call of 'flash_triton' .* graph .* call it once before")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        FlashAttentionTriton.apply(q, k, v, True)
    right = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(FlashAttentionTriton.apply(q, k, v, True), right, rtol=0.02, atol=0.02)


def test_a_call_on_the_memory_of_another_reads_what_is_there_now(variant: str) -> None:
    room = torch.empty(4, 2 * 3 * 256 * 64, device="cuda", dtype=BF16)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "heads first": lambda x: x.view(2, 3, 256, 64),
        "positions first": lambda x: x.view(2, 256, 3, 64).transpose(1, 2),
        "more heads": lambda x: x.view(2, 6, 128, 64),
        "other type": lambda x: x.view(FP16).view(2, 3, 256, 64),
    }
    side = torch.cuda.Stream()
    for i in range(4):
        for name, view in views.items():
            for causal, scale in ((True, 0.125), (False, 0.125), (True, 0.3)):
                parts = [view(x) for x in room]
                for j, part in enumerate(parts):
                    part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(10 * i + j)))
                q, k, v, do = (x.detach().requires_grad_() for x in parts)
                torch.cuda.synchronize()
                with torch.cuda.stream(side if i == 3 else torch.cuda.current_stream()):
                    out = FlashAttentionTriton.apply(q, k, v, causal, scale)
                    found = (out, *torch.autograd.grad(out, (q, k, v), do))
                torch.cuda.synchronize()
                wide = [x.detach().double().requires_grad_() for x in parts[:3]]
                expected = scaled_dot_product_attention(wide[0], wide[1], wide[2], is_causal=causal, scale=scale)
                right = (expected, *torch.autograd.grad(expected, wide, do.double()))
                for x, y in zip(found, right, strict=True):
                    assert (x.double() - y).norm() <= 0.01 * y.norm(), (i, name, causal, scale)
    assert len(triton_repeats._known) >= 2 * 4 * 3, "calls were made again"


def test_profilers_and_counters_see_the_operators_that_are_passed_by_without_them() -> None:
    q, k, v = inputs(1, 2, 256, 64)

    def run() -> tuple[Tensor, ...]:
        out = FlashAttentionTriton.apply(q, k, v, True)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    right = run()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        under_a_profiler = run()
    with FlopCounterMode(display=False) as counter:
        under_a_counter = run()
    seen = {event.key for event in profiled.key_averages()}
    assert {"steplab::flash_triton_forward", "steplab::flash_triton_backward"} <= seen
    assert counter.get_total_flops() > 0
    for found in (under_a_profiler, under_a_counter):
        assert all(map(torch.equal, found, right))


def test_it_runs_on_the_stream_that_is_current() -> None:
    q, k, v = inputs(1, 2, 513, 64)
    right = FlashAttentionTriton.apply(q, k, v, True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(20_000_000)  # cycles: a reader that does not wait sees old values
        found = FlashAttentionTriton.apply(q.clone(), k.clone(), v.clone(), True)
    side.synchronize()
    assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_casts_what_goes_in(dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 2, 130, 64, dtype=FP32)
    with torch.autocast("cuda", dtype):
        out = FlashAttentionTriton.apply(q, k, v, True)
    low = q_, k_, v_ = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    right = FlashAttentionTriton.apply(q_, k_, v_, True)
    assert out.dtype == dtype
    assert torch.equal(out, right)
    do = torch.randn_like(right)
    pairs = zip(torch.autograd.grad(out, (q, k, v), do), torch.autograd.grad(right, low, do), strict=True)
    for found, expected in pairs:
        assert found.dtype == FP32
        assert torch.equal(found, expected.float())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_device_that_is_not_current() -> None:
    q, k, v = inputs(1, 2, 130, 64)
    do = torch.randn_like(q)
    right = results_of(FlashAttentionTriton, q, k, v, do, causal=True)
    assert torch.cuda.current_device() == 0
    q, k, v, do = (x.to("cuda:1") for x in (q, k, v, do))
    found = results_of(FlashAttentionTriton, q, k, v, do, causal=True)
    for name, expected in right.items():
        assert found[name].device.index == 1
        assert torch.equal(found[name].to("cuda:0"), expected), name
