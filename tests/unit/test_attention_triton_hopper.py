"""Which tiles the Hopper kernels visit, and which of them they mask: the kernels' own arithmetic, run as Python.

Their products run on no CPU. What a kernel works out before it starts its warps are whole numbers.
"""

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from steplab.ops.attention import triton_hopper_backward, triton_hopper_forward

ROWS_OF_A_PROGRAM = 128
LENGTHS = [1, 64, 65, 127, 128, 200, 300]
ANYTHING = MagicMock()


@contextmanager
def as_python(module: ModuleType, program: int, num_programs: int = 1) -> Iterator[list[Any]]:
    """Runs what the module's kernels do with whole numbers; gives what they start their warps with."""
    started: list[Any] = []
    language = SimpleNamespace(
        cdiv=lambda a, b: -(-a // b),
        maximum=max,
        minimum=min,
        program_id=lambda axis: program,
        num_programs=lambda axis: num_programs,
        warp_specialize=lambda workers, *rest: started.extend(workers),
    )
    names = {"own_tiles", "barrier", "ring", "_numbers", "fence_async_shared"} & set(vars(module))
    fakes: dict[str, Any] = dict.fromkeys(names, ANYTHING) | {"gl": language, "NUM_CONSUMERS": 2, "ROWS": 64}
    with patch.multiple(module, **{name: fake for name, fake in fakes.items() if hasattr(module, name)}):
        yield started


def numbers_of(kernel: Any, program: int, **given: Any) -> dict[str, Any]:
    """What a kernel's program tells its consumers, by the names under which they take it."""
    names = inspect.signature(kernel.fn).parameters
    with as_python(triton_hopper_backward, program) as started:
        kernel.fn(**{name: given.get(name, ANYTHING) for name in names})
    consumer, arguments = started[0]
    return dict(zip(inspect.signature(consumer.fn).parameters, arguments, strict=False))


def seen(num_queries: int, num_keys: int, *, causal: bool) -> torch.Tensor:
    """[queries, keys], with room for the padding of the last tiles, where nothing is seen."""
    pairs = torch.zeros(num_queries + 256, num_keys + 256, dtype=torch.bool)
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool)
    pairs[:num_queries, :num_keys] = ones.tril() if causal else ones
    return pairs


def assert_all_is_done_once(done: torch.Tensor, right: torch.Tensor, num_queries: int, case: object) -> None:
    """Padded queries weigh nothing by themselves, and may be visited unmasked."""
    assert torch.equal(done[:num_queries], right[:num_queries].int()), case


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_keys_meet_every_query_that_sees_them_once(tile: int, causal: bool) -> None:
    for num_queries in LENGTHS:
        for num_keys in LENGTHS:
            right = seen(num_queries, num_keys, causal=causal)
            done = torch.zeros(right.shape, dtype=torch.int)
            for program in range(-(-num_keys // ROWS_OF_A_PROGRAM)):
                told = numbers_of(
                    triton_hopper_backward.backward_kv_kernel,
                    program,
                    num_heads=1,
                    sharing=1,
                    num_queries=num_queries,
                    num_keys=num_keys,
                    CAUSAL=causal,
                    M=tile,
                )
                keys = slice(told["first_key"], told["first_key"] + ROWS_OF_A_PROGRAM)
                for t in range(told["num_tiles"]):
                    first = told["first_query"] + t * tile
                    visited = right[first : first + tile, keys]
                    assert visited.any(), "a tile of which nothing is seen"
                    done[first : first + tile, keys] += visited if t < told["num_masked"] else torch.tensor(1)
            assert_all_is_done_once(done, right, num_queries, (num_queries, num_keys))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_queries_meet_every_key_that_they_see_once(tile: int, causal: bool) -> None:
    for num_queries in LENGTHS:
        for num_keys in LENGTHS:
            right = seen(num_queries, num_keys, causal=causal)
            done = torch.zeros(right.shape, dtype=torch.int)
            for program in range(-(-num_queries // ROWS_OF_A_PROGRAM)):
                told = numbers_of(
                    triton_hopper_backward.backward_q_kernel,
                    program,
                    num_heads=1,
                    sharing=1,
                    num_queries=num_queries,
                    num_keys=num_keys,
                    CAUSAL=causal,
                    N=tile,
                )
                queries = slice(told["first_query"], told["first_query"] + ROWS_OF_A_PROGRAM)
                for i in range(told["num_tiles"]):
                    first = (told["num_tiles"] - 1 - i) * tile
                    visited = right[queries, first : first + tile]
                    assert first < num_keys
                    done[queries, first : first + tile] += visited if i < told["num_masked"] else torch.tensor(1)
            assert_all_is_done_once(done, right, num_queries, (num_queries, num_keys))


@pytest.mark.parametrize(("num_heads", "sharing"), [(1, 1), (4, 2), (6, 3)])
def test_programs_share_out_heads_and_batches(num_heads: int, sharing: int) -> None:
    batch, length = 3, 300
    tiles = -(-length // ROWS_OF_A_PROGRAM)
    sizes = {"num_heads": num_heads, "sharing": sharing, "num_queries": length, "num_keys": length, "CAUSAL": True}
    kernel = triton_hopper_backward.backward_q_kernel
    told = [numbers_of(kernel, program, N=64, **sizes) for program in range(batch * num_heads * tiles)]
    assert {(x["b"], x["head"], x["first_query"]) for x in told} == {
        (b, head, ROWS_OF_A_PROGRAM * t) for b in range(batch) for head in range(num_heads) for t in range(tiles)
    }
    num_kv_heads = num_heads // sharing
    kernel = triton_hopper_backward.backward_kv_kernel
    told = [numbers_of(kernel, program, M=64, **sizes) for program in range(batch * num_kv_heads * tiles)]
    assert {(x["b"], x["kv_head"], x["first_key"]) for x in told} == {
        (b, head, ROWS_OF_A_PROGRAM * t) for b in range(batch) for head in range(num_kv_heads) for t in range(tiles)
    }


@pytest.mark.parametrize("num_programs", [1, 2, 4, 5, 8, 48])
@pytest.mark.parametrize("causal", [False, True])
def test_programs_of_the_forward_kernel_share_out_all_tasks(causal: bool, num_programs: int) -> None:
    batch, num_heads, num_queries, num_keys, tile = 1, 3, 600, 500, 64
    num_tasks = batch * num_heads * -(-num_queries // ROWS_OF_A_PROGRAM)
    found = []
    for program in range(min(num_programs, num_tasks)):
        with (
            as_python(triton_hopper_forward, program, min(num_programs, num_tasks)),
            patch.object(triton_hopper_forward, "TASK", ROWS_OF_A_PROGRAM),
        ):
            for number in range(triton_hopper_forward._tasks_of_program.fn(num_tasks)):
                found.append(
                    triton_hopper_forward._task.fn(number, num_tasks, num_heads, num_queries, num_keys, causal, tile)
                )
    right = seen(num_queries, num_keys, causal=causal)
    expected = []
    for b in range(batch):
        for head in range(num_heads):
            for first in range(0, num_queries, ROWS_OF_A_PROGRAM):
                keys = int(right[first : first + ROWS_OF_A_PROGRAM].any(0).sum())
                expected.append((b, head, first, -(-keys // tile)))
    assert sorted(found) == expected
