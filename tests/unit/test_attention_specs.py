import itertools
from pathlib import Path

import pytest
import torch
from tests.attention_records import make_benchmark, make_cell
from tests.sure import sure
from torch.profiler import ProfilerActivity, profile

from steplab.costs.operators import attention_flops
from steplab.errors import UserError
from steplab.ops.attention.plain import plain_attention
from steplab.plan.attention_memory import OF_CUDA_ALONE, account_of_failure, plain_account, smallest_that_does_not_fit
from steplab.report.attention.document import account_document
from steplab.specs.attention import AttentionSpec, AttentionStudy, cells_of, cells_of_grid, resolve_attention
from steplab.specs.study import GRIDS, preset_names

GIB = 1024**3
PEER_ROWS = {
    (1, 16, 16384, 64, True),
    (1, 16, 16384, 128, True),
    (4, 16, 4096, 128, True),
    (4, 16, 4096, 128, False),
    (4, 16, 4096, 64, True),
    (16, 16, 1024, 128, True),
    (2, 32, 32768, 128, True),
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch": "0"}, "batch must be at least 1"),
        ({"dim": "6.4"}, "dim must be a whole number, not '6.4'"),
        ({"causal": "maybe"}, "causal must be true or false, not 'maybe'"),
        ({"dtype": "fp8"}, "dtype 'fp8' is not known; choose one of fp32, tf32, bf16, fp16"),
        ({"implementation": "magic"}, "implementation 'magic' is not known; choose one of plain, sdpa"),
        ({"heads": "6", "kv_heads": "4"}, "heads must be a multiple of kv-heads, not 6 of 4"),
        ({"length": "4"}, "unknown field 'length'"),
    ],
)
def test_a_cell_that_makes_no_sense_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        resolve_attention(fields)


def test_a_sequence_is_queries_and_keys_and_what_is_left_out_follows() -> None:
    spec = resolve_attention({"sequence": "512", "heads": 4, "causal": "true"})
    assert (spec.queries, spec.keys, spec.kv_heads, spec.causal) == (512, 512, 4, True)
    assert spec.label == "1×4×512×64 causal bf16"
    for fields in ({"sequence": 512, "queries": 1}, {"queries": 1, "sequence": 512}):  # in whichever order
        assert resolve_attention(fields).sizes_label == "1×1×1/512×64"
    grouped = resolve_attention({"queries": 1, "keys": 512, "heads": 8, "kv_heads": 2, "compile": "default"})
    assert (grouped.sizes_label, grouped.column) == ("1×8/2×1/512×64", "plain, compiled")


def test_the_peers_grid_is_that_of_the_table() -> None:
    _, _, cells = cells_of_grid("peers", {}, {"implementation": ["plain", "flex"]})
    assert {(c.batch, c.heads, c.queries, c.dim, c.causal) for c in cells} == PEER_ROWS
    assert len(cells) == 2 * len(PEER_ROWS)
    assert {(c.dtype, c.queries == c.keys) for c in cells} == {("bf16", True)}


def test_the_studies_have_the_cells_that_conventions_ask_for() -> None:
    study, long = (cells_of_grid(name, {})[2] for name in ("study", "long"))
    assert {(c.dim, c.queries) for c in study} == set(
        itertools.product((16, 32, 64, 128), (256, 512, 1024, 2048, 4096, 8192, 16384))
    )
    assert {(c.batch, c.heads, c.causal) for c in study} == {(8, 1, False)}
    assert {(c.batch, c.causal) for c in long} == {(1, True)}
    for cells in (study, long):
        for shape in {c.shape for c in cells}:
            columns = {c.column for c in cells if c.shape == shape}
            assert columns >= {"plain", "plain, compiled", "flash_triton"}
    assert {c.queries for c in long} == {2**power for power in range(7, 17)}
    assert {c.dtype for c in long} == {"bf16", "fp32"}


@pytest.mark.parametrize("name", preset_names(GRIDS))
def test_every_grid_that_comes_along_is_one(name: str) -> None:
    _, description, cells = cells_of_grid(name, {})
    assert description
    assert cells


def test_lists_take_the_place_of_the_grids_own() -> None:
    _, _, cells = cells_of_grid("peers", {"sequence": ["64"], "dim": [16], "batch": [2]}, {"dtype": ["fp32"]})
    assert {c.queries for c in cells} == {64}
    assert {c.dtype for c in cells} == {"bf16"}  # the grid's own, else the default
    _, _, apart = cells_of_grid("peers", {"queries": ["1"], "keys": [64]})
    assert {(c.queries, c.keys) for c in apart} == {(1, 64)}


def test_a_grid_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[[grid]]\nsequence = [8, 16]\ndim = 4\n")
    name, _, cells = cells_of_grid(str(path), {})
    assert (name, [c.queries for c in cells]) == ("mine", [8, 16])
    path.write_text("[[grids]]\n")
    with pytest.raises(UserError, match="unknown field `grids`; a grid has the keys description, grid"):
        cells_of_grid(str(path), {})
    with pytest.raises(UserError, match="no grid 'nowhere': choose one of choice, long, peers, study, tiny, or"):
        cells_of_grid("nowhere", {})


def test_cells_of_one_shape_stand_together_in_a_study() -> None:
    study = AttentionStudy(name="x", cells=cells_of([{"implementation": ["plain", "sdpa"], "sequence": [8, 16]}]))
    assert [(c.queries, c.implementation) for c in study.cells] == [
        (8, "plain"),
        (8, "sdpa"),
        (16, "plain"),
        (16, "sdpa"),
    ]


# --- FLOPs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (8, 8)])
def test_flops_are_those_that_a_loop_over_all_elements_counts(queries: int, keys: int) -> None:
    batch, heads, dim = 2, 3, 4
    counted = 0
    for _ in range(batch * heads):
        for _query, _key in itertools.product(range(queries), range(keys)):
            counted += 2 * dim  # the product of a query and a key
            counted += 2 * dim  # and what it adds to the output
    spec = AttentionSpec(batch=batch, heads=heads, kv_heads=1, queries=queries, keys=keys, dim=dim)
    flops = attention_flops(spec)
    assert flops == {"forward": counted, "backward": 2.5 * counted, "both": 3.5 * counted}


def test_causal_flops_are_those_of_the_visible_half() -> None:
    length, dim = 512, 16
    seen = sum(4 * dim for query in range(length) for key in range(length) if key <= query)
    flops = attention_flops(AttentionSpec(queries=length, dim=dim, causal=True))["forward"]
    assert flops == pytest.approx(seen, rel=1 / length)


def test_flops_of_the_first_peer_are_those_of_its_published_rate() -> None:
    """FA2's 7.02 ms are 274 TFLOP/s: 3.5 x 4 x 16 x 16384² x 64 / 2 over the time."""
    flops = attention_flops(AttentionSpec(heads=16, queries=16384, dim=64, causal=True))["both"]
    assert flops / 7.02e-3 == pytest.approx(274e12, rel=0.005)


# --- memory -----------------------------------------------------------------------------------------------


def highest_moment(spec: AttentionSpec, *, backward: bool) -> int:
    q, do = (torch.randn(spec.batch, spec.heads, spec.queries, spec.dim) for _ in range(2))
    k, v = (torch.randn(spec.batch, spec.heads, spec.num_keys, spec.dim) for _ in range(2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = plain_attention(q, k, v, causal=spec.causal)
        if backward:
            torch.autograd.grad(output, leaves, do)
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 3)])
def test_the_account_of_plain_attention_is_what_the_allocator_gives_out(
    batch: int, heads: int, causal: bool, backward: bool
) -> None:
    spec = AttentionSpec(batch=batch, heads=heads, queries=192, dim=8, causal=causal, dtype="fp32")
    _, terms = plain_account(spec, backward=backward)
    own = sum(term.num_bytes for term in terms[4:] if term.what != OF_CUDA_ALONE)
    assert any(term.what == OF_CUDA_ALONE for term in terms) == backward
    assert [term.what for term in terms[:4]] == ["queries", "keys", "values", "gradient of the output"]
    assert highest_moment(spec, backward=backward) == pytest.approx(own, rel=0.02)


def test_the_smallest_that_does_not_fit_is_found_by_doubling() -> None:
    cells = cells_of([{"sequence": [1024], "dim": [64, 16], "dtype": ["fp32"], "causal": [True]}])
    account = smallest_that_does_not_fit(cells, 140 * GIB, "a GPU", backward=True)
    assert (account.spec.queries, account.spec.dim) == (131072, 16)
    found = account.spec.label
    asked = "Plain attention of 1×1×1024×16 causal fp32 fits; its sequence doubled until it does not: "
    assert account_document(account).title == f"{asked}{found}"
    given = smallest_that_does_not_fit([account.spec, *cells], 140 * GIB, "a GPU", backward=True)
    assert given.spec == account.spec
    assert account_document(given).title == f"The smallest plain attention that does not fit: {found}"
    squares = 4 * 4 * 131072**2 + 131072**2
    assert squares < account.total_bytes < 1.01 * squares
    assert account.previous is not None
    assert (account.previous.queries, account.previous.dim) == (65536, 16)
    assert account.previous_bytes is not None
    assert account.previous_bytes < 140 * GIB < account.total_bytes


def test_the_account_of_a_failure_is_of_the_smallest_cell_that_failed_for_memory() -> None:
    benchmark = make_benchmark("study", {"implementation": ["plain"]})
    account = sure(account_of_failure(benchmark.cells, 140 * GIB, "a GPU"))
    assert (account.spec.batch, account.spec.queries, account.spec.dim) == (8, 16384, 16)
    assert account.measured is not None
    assert sure(account.previous).queries == 8192
    fine = [make_cell(cell.spec) for cell in benchmark.cells if cell.spec.queries < 16384]
    assert account_of_failure(fine, 140 * GIB, "a GPU") is None
