"""The Hopper kernels' own integer arithmetic as Python: visited, masked and ordered tiles. Their products run on no
CPU.
"""

import importlib.util
import inspect
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from tests.first import first

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from steplab.ops.attention import triton_hopper_backward, triton_hopper_forward
from steplab.ops.attention.triton_schedule import dealt, heads_a_group, heads_in_a_row, task_table, tasks_in_order

KEYS = 128
WIDTHS = [(64, 128), (128, 64)]
LENGTHS = [1, 64, 65, 127, 128, 300]
ANYTHING = MagicMock()


@contextmanager
def as_python(module: ModuleType, program: int = 0) -> Iterator[list[Any]]:
    started: list[Any] = []
    language = MagicMock(
        cdiv=lambda a, b: -(-a // b),
        maximum=max,
        minimum=min,
        where=lambda condition, x, y: x if condition else y,
        static_range=range,
        program_id=lambda axis: program,
        warp_specialize=lambda workers, *rest: started.extend(workers),
    )
    fakes: dict[str, Any] = {
        "gl": language,
        "mbarrier": ANYTHING,
        "fence_async_shared": ANYTHING,
        "new_mbarrier": ANYTHING,
        "allocate_parts": lambda *given: (ANYTHING, ANYTHING),
        "_barriers": ANYTHING,
        "_task": triton_hopper_backward._task.fn,
        "SharedStorage": ANYTHING,
    }
    fakes |= {"KEYS": KEYS, "PART": 32, "ROWS": 64, "NUM_CONSUMERS": 2, "ZERO": 0, "ONE": 1}
    with patch.multiple(module, **{name: fake for name, fake in fakes.items() if hasattr(module, name)}):
        yield started


def workers_of(program: int, **given: Any) -> list[tuple[Any, dict[str, Any]]]:
    kernel = triton_hopper_backward.attention_backward
    names = inspect.signature(kernel.fn).parameters
    usual: dict[str, Any] = {"heads_in_all": 1, "heads_a_group": 1, "num_upwards": 0, "num_heads": 1, "sharing": 1}
    usual |= {"IN_A_ROW": 1, "M": 64, "MAIN": 128, "REST": 0, "BOX": 128, "NUM_SLOTS": 2}
    with as_python(triton_hopper_backward, program) as started:
        kernel.fn(**{name: (usual | given).get(name, ANYTHING) for name in names})
    return [(w, dict(zip(inspect.signature(w.fn).parameters, told, strict=True))) for w, told in started]


def told_by(program: int, **given: Any) -> dict[str, Any]:
    return {name: value for _, told in workers_of(program, **given) for name, value in told.items()}


def seen(num_queries: int, num_keys: int, *, causal: bool) -> torch.Tensor:
    pairs = torch.zeros(num_queries + 256, num_keys + 256, dtype=torch.bool)
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool)
    pairs[:num_queries, :num_keys] = ones.tril() if causal else ones
    return pairs


@pytest.mark.parametrize("upwards", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_keys_meet_every_query_that_sees_them_once(causal: bool, upwards: bool, rows: int) -> None:
    for num_queries, num_keys in itertools.product(LENGTHS, LENGTHS):
        right = seen(num_queries, num_keys, causal=causal)
        done = torch.zeros(right.shape, dtype=torch.int)
        for program in range(-(-num_keys // KEYS)):
            sizes = {"num_queries": num_queries, "num_keys": num_keys, "CAUSAL": causal, "M": rows}
            told = told_by(program, num_upwards=int(upwards), **sizes)
            keys = slice(told["first_key"], told["first_key"] + KEYS)
            num_tiles, num_masked, num_whole = told["num_tiles"], told["num_masked"], told["num_whole"]
            for t in range(num_tiles):
                first = told["first_query"] + t * rows
                visited = right[first : first + rows, keys]
                assert visited.any(), "a tile of which nothing is seen"
                masked = t < num_masked or t >= max(num_masked, num_whole)
                done[first : first + rows, keys] += visited if masked else torch.tensor(1)
        assert torch.equal(done, right.int()), (num_queries, num_keys)


@pytest.mark.parametrize(("num_heads", "sharing", "in_a_row"), [(1, 1, 1), (4, 2, 1), (6, 3, 1), (4, 2, 2), (8, 4, 2)])
@pytest.mark.parametrize("together", [1, 2, 5])
def test_programs_share_out_heads_and_batches(num_heads: int, sharing: int, in_a_row: int, together: int) -> None:
    batch, length = 3, 300
    tiles = -(-length // KEYS)
    sizes = {"num_heads": num_heads, "sharing": sharing, "num_queries": length, "num_keys": length, "CAUSAL": True}
    sizes |= {"heads_in_all": batch * num_heads, "heads_a_group": together, "num_upwards": num_heads}
    sizes |= {"IN_A_ROW": in_a_row}
    told = [told_by(program, **sizes) for program in range(batch * num_heads * tiles // in_a_row)]
    assert sorted((x["b"], x["head"], x["first_key"]) for x in told) == [
        (b, head, KEYS * t) for b in range(batch) for head in range(0, num_heads, in_a_row) for t in range(tiles)
    ]
    assert all(x["kv_head"] == x["head"] // sharing for x in told)
    assert all(x["b_kv_head"] == x["b"] * (num_heads // sharing) + x["kv_head"] for x in told)
    # A head waits for earlier heads' parts of shared keys.
    order = {(x["b"], x["head"], x["first_key"]): program for program, x in enumerate(told)}
    for b, head, first_key in order:
        if head % sharing:
            assert order[b, head - in_a_row, first_key] < order[b, head, first_key]
    # And does so when they have ended: those that are under way together have other keys, if there are as many.
    for start in range(0, len(told), together):
        neighbours = [x for x in told[start : start + together] if x["first_key"] == told[start]["first_key"]]
        assert len({x["b_kv_head"] for x in neighbours}) == len(neighbours)


@pytest.mark.parametrize(("columns", "rows"), WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_upwards", [0, 2, 100])
@pytest.mark.parametrize("in_a_row", [1, 2])
@pytest.mark.parametrize("lengths", first(2, [(200, 600), (129, 128), (600, 200), (1, 300), (600, 600)]), ids=str)
def test_turns_come_to_all_and_wait_for_lower_programs_alone(
    causal: bool, num_upwards: int, in_a_row: int, lengths: tuple[int, int], columns: int, rows: int
) -> None:
    """For any number of concurrent programs; with one, each finds its turn."""
    num_queries, num_keys = lengths
    heads, num_padded = 3 * in_a_row, -(-num_queries // KEYS) * KEYS
    sizes = {"num_queries": num_queries, "num_keys": num_keys, "num_padded": num_padded, "CAUSAL": causal}
    sizes |= {"heads_in_all": heads, "heads_a_group": 2, "num_upwards": num_upwards, "num_heads": heads}
    sizes |= {"sharing": in_a_row, "IN_A_ROW": in_a_row}
    sizes |= {"M": rows, "MAIN": columns, "BOX": columns}
    turns = [0] * (2 * heads * num_padded // KEYS)
    first_of_tile: dict[int, list[bool]] = {}
    for program in range(heads // in_a_row * -(-num_keys // KEYS)):
        workers = workers_of(program, **sizes)
        adders = [told for worker, told in workers if worker is triton_hopper_backward._add_up]
        waits: list[tuple[int, int]] = []
        with (
            as_python(triton_hopper_backward, program),
            patch.multiple(
                triton_hopper_backward,
                tma=SimpleNamespace(store_wait=ANYTHING),
                store_tile=lambda tiles, at, part: first_of_tile.setdefault(at[0], []).append(True),
                _tile=triton_hopper_backward._tile.fn,
                wait_turn=lambda turn, at, waits=waits: waits.append((turn, turns[at])),
                release_turn=lambda at: turns.__setitem__(at, turns[at] + 1),
                written=ANYTHING,
                add_tile=lambda tiles, at, part: first_of_tile.setdefault(at[0], []).append(False),
            ),
        ):
            for told in adders:
                triton_hopper_backward._add_up.fn(**told | {"turns_ptr": 0})
        assert all(turn == now for turn, now in waits), program
    visible = range(-(-num_queries // KEYS))
    of_blocks = [min(q, -(-num_keys // KEYS) - 1) + 1 if causal else -(-num_keys // KEYS) for q in visible]
    assert turns == [count for count in of_blocks * heads for consumer in range(2)]
    # The first at a tile stores, later ones add.
    assert all(stored == [True] + [False] * (len(stored) - 1) for stored in first_of_tile.values())
    # Each in pieces of 64 queries and 32 columns, as `attention_finish` takes them.
    tiles = -(-num_queries // rows)
    pieces = {64 * i for head in range(heads) for i in _pieces(head * num_padded, tiles * rows, columns)}
    assert set(first_of_tile) == pieces


def test_a_turn_that_another_warp_has_ended_is_not_waited_for() -> None:
    from steplab.ops.attention import triton_hopper_turns

    counts = iter([3, 5])
    with patch.multiple(triton_hopper_turns, gl=MagicMock(), _now=lambda turn_ptr: next(counts)):
        triton_hopper_turns.wait_turn.fn(4, 0)
    assert list(counts) == []


def _pieces(first_query: int, num_queries: int, columns: int) -> range:
    a_query = columns // 32
    return range(first_query // 64 * a_query, (first_query + num_queries) // 64 * a_query)


# --- the forward kernel's tasks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_tasks_are_all_queries_with_the_keys_that_they_see(causal: bool, rows: int, together: int) -> None:
    num_heads, num_queries, num_keys, tile = 6, 600, 500, 64
    tasks = tasks_in_order(num_heads, num_queries, num_keys, rows=rows, tile=tile, together=together, causal=causal)
    right = seen(num_queries, num_keys, causal=causal)
    expected = []
    for head, start in itertools.product(range(num_heads), range(0, num_queries, rows)):
        keys = int(right[start : start + rows].any(0).sum())
        expected.append((head, start, -(-keys // tile)))
    assert sorted(tasks) == sorted(expected)
    groups = [task.head // together for task in tasks]
    assert groups == sorted(groups), "heads that share the cache are done together"
    assert all(
        earlier.num_tiles >= later.num_tiles
        for earlier, later in itertools.pairwise(tasks)
        if earlier.head // together == later.head // together
    ), "the longest first"
    with as_python(triton_hopper_forward):
        found = [triton_hopper_forward._num_tiles.fn(x.first_query, num_keys, causal, tile, rows) for x in tasks]
    assert found == [task.num_tiles for task in tasks], "what the kernel takes them to be"


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_a_consumer_passes_hidden_tiles_over_and_masks_the_first_that_it_sees_alone(
    causal: bool, rows: int, tile: int
) -> None:
    for num_queries, num_keys in itertools.product(LENGTHS, LENGTHS):
        right = seen(num_queries, num_keys, causal=causal)
        for first_query in range(0, num_queries, 64):
            of_task = first_query // rows * rows
            with as_python(triton_hopper_forward):
                num_tiles = triton_hopper_forward._num_tiles.fn(of_task, num_keys, causal, tile, rows)
                hidden = triton_hopper_forward._num_hidden.fn(first_query, num_tiles, num_keys, causal, tile)
            queries = slice(first_query, min(first_query + 64, num_queries))
            # From the last tile of keys to the first, as the consumer takes them.
            tiles = [right[queries, t * tile : (t + 1) * tile] for t in range(num_tiles)][::-1]
            assert not any(x.any() for x in tiles[:hidden])
            assert hidden < num_tiles
            assert all(x.all() for x in tiles[hidden + 1 :]), (num_queries, num_keys, first_query)


@pytest.mark.parametrize("num_programs", [1, 3, 7, 132])
def test_each_task_is_dealt_once_and_none_waits_for_long(num_programs: int) -> None:
    lengths = [8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1] * 20
    rows = dealt(lengths, num_programs)
    assert sorted(task for row in rows for task in row) == list(range(len(lengths)))
    assert len(rows) == min(num_programs, len(lengths))
    sums = [sum(lengths[task] + 0.6 for task in row) for row in rows]
    assert max(sums) <= sum(sums) / len(rows) + max(lengths) + 0.6, "as list scheduling promises (Graham 1969)"
    assert all(row == sorted(row) for row in rows), "in the order in which heads share the cache"


def test_the_table_says_how_many_tasks_a_program_has_and_leaves_room_to_read_one_more() -> None:
    table = task_table(
        4, 600, 600, rows=128, tile=128, together=2, causal=True, num_programs=3, device=torch.device("cpu")
    )
    assert table.dtype == torch.int32
    assert table.shape[0] == 3
    found = [(row[2 * i], row[2 * i + 1]) for count, *row in table.tolist() for i in range(count)]
    assert sorted(found) == list(itertools.product(range(4), range(0, 600, 128)))
    assert all(2 * count + 3 <= table.shape[1] for count in table[:, 0].tolist())


def test_a_table_that_a_graph_may_read_stays_when_others_are_made() -> None:
    def made(num_keys: int) -> torch.Tensor:
        options = {"rows": 128, "tile": 128, "together": 1, "causal": False, "num_programs": 1}
        return task_table(1, 128, num_keys, device=torch.device("cpu"), **options)

    first = made(1)
    assert all(made(num_keys) is not first for num_keys in range(2, 400))
    assert made(1) is first


def test_heads_go_in_pairs_where_the_cache_holds_some_and_no_multiprocessor_lacks_work() -> None:
    def of(length: int, columns: int, *, sharing: int = 4, heads: int = 128) -> int:
        return heads_in_a_row(length * columns * 4, sharing, -(-length // KEYS) * heads, 132)

    assert of(1024, 128) == of(2048, 128) == of(4096, 64) == 2
    assert of(4096, 128) == of(8192, 64) == 1, "too long for the cache"
    assert of(1024, 128, sharing=3) == of(1024, 128, sharing=1) == 1
    assert of(1024, 128, heads=100) == 2
    assert of(1024, 128, heads=98) == 1, "fewer than three programs for each of 132"


def test_groups_of_heads_fit_the_cache_and_are_never_empty() -> None:
    assert heads_a_group(2**20, 100) == 16
    assert heads_a_group(2**20, 4) == 4
    assert heads_a_group(2**30, 4) == 1


def test_the_triton_at_hand_takes_the_kernels() -> None:
    """A GPU runs the kernels with one version only (`hopper_kernels_run`)."""
    script = Path(__file__).parents[1] / "hopper_modules.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    for name, num_products, num_asynchronous in map(json.loads, said.stdout.splitlines()):
        assert num_products == num_asynchronous > 0, f"{name}: a consumer would wait for a product"
