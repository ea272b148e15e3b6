import gc
import importlib
import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from steplab.ops.attention import triton_backward, triton_forward
from steplab.ops.attention.implementations import implementation
from steplab.ops.attention.triton_backward import (
    _layout,
    _results,
    _start_of_prepare,
    _start_of_sweep,
    _starts_of_one_sweep,
)
from steplab.ops.attention.triton_launch import Call, Form, Start
from steplab.ops.attention.triton_tensors import columns
from steplab.ops.attention.triton_tuning import Kernel, Tiles, Variant

COMPILER_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}


class Descriptor:
    pass


class KernelWithoutGpu:
    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.by_triton: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            self.by_triton.append((grid, args, options))
            return {grid: lambda *args: self.compiled.append((grid, args))}

        return start

    def all_given(self) -> list[Any]:
        _, args, options = self.by_triton[0]
        given = dict(zip(self.arg_names, args, strict=False)) | options
        assert len(given) == len(args) + len(options), "a parameter is given twice"
        assert given.keys() - set(self.arg_names) <= COMPILER_OPTIONS
        return [given[name] for name in self.arg_names]


class NotKept(list[Any]):
    def append(self, item: Any) -> None: ...


def test_a_compiled_kernel_gets_all_in_its_own_order_and_other_tensors() -> None:
    kernel = KernelWithoutGpu(["x_ptr", "y_tiles", "count", "FLAG", "SIZE"])
    form = Form(Descriptor, {"shape": [4], "strides": [1]})
    start = Start(kernel, 3, [None, form], [7], SIZE=2, FLAG=True, num_warps=4)
    first, second = ([torch.zeros(4), torch.ones(4)] for _ in range(2))
    start(*first)
    start(*second)
    ((grid, args, options),) = kernel.by_triton
    assert (grid, args[0] is first[0], args[1].base is first[1], args[2:]) == ((3, 1, 1), True, True, (7,))
    assert options == {"SIZE": 2, "FLAG": True, "num_warps": 4, "enable_fp_fusion": True}
    ((grid, args),) = kernel.compiled
    assert (grid, args[0] is second[0], args[1].base is second[1], args[2:]) == ((3, 1, 1), True, True, (7, True, 2))
    assert (args[1].shape, args[1].strides) == ([4], [1])


def test_no_tensor_is_kept_between_calls() -> None:
    kernel = KernelWithoutGpu(["x_ptr", "y_tiles"])
    kernel.by_triton, kernel.compiled = NotKept(), NotKept()
    start = Start(kernel, 1, [None, Form(Descriptor, {})], [])
    tensors = [torch.zeros(4), torch.ones(4)]
    seen = [weakref.ref(x) for x in tensors]
    start(*tensors)
    start(*tensors)
    del tensors
    gc.collect()
    assert [x() for x in seen] == [None, None]


Q_SHAPE, K_SHAPE = (1, 4, 50, 64), (1, 2, 70, 64)
Q, K = (12800, 3200, 64, 1), (8960, 4480, 64, 1)
CALL = Call(columns(64), torch.bfloat16, torch.device("cpu"), "ieee", True, 0.125)


def tiles_of(kernel: Kernel, variant: Variant) -> Tiles:
    return Tiles(kernel=kernel, gpu="any", bits=16, box=64, variant=variant, queries=128, keys=128, stages=2)


def starts(kernel: Kernel, variant: Variant, head_dim: int = 64) -> tuple[Start, int]:
    tiles = tiles_of(kernel, variant)
    if kernel == "forward":
        call = CALL._replace(parts=columns(head_dim))
        with patch.object(triton_forward, "num_multiprocessors", return_value=3):
            start, more = triton_forward._start.__wrapped__(tiles, call, Q_SHAPE, K_SHAPE, (Q, K, K, Q))
        return start, 5 + len(more) + (2 if call.parts.rest else 0)
    gradients = (K, K) if kernel == "backward_kv" else (Q,)
    start = _start_of_sweep.__wrapped__(tiles, CALL, Q_SHAPE, K_SHAPE, (Q, K, K, Q, *gradients))
    return start, 6 + len(gradients)


@pytest.mark.parametrize(
    ("kernel", "variant", "head_dim"),
    [
        ("forward", "portable", 64),
        ("forward", "hopper", 64),
        ("forward", "hopper", 80),
        ("backward_kv", "portable", 64),
        ("backward_q", "portable", 64),
    ],
)
def test_each_kernel_is_given_its_parameters_each_once(kernel: Kernel, variant: Variant, head_dim: int) -> None:
    file = "portable" if variant == "portable" else f"hopper_{kernel}"
    home = importlib.import_module(f"steplab.ops.attention.triton_{file}")
    noted = KernelWithoutGpu(list(getattr(home, f"attention_{kernel}").arg_names))
    with patch.object(home, f"attention_{kernel}", noted):
        start, num_tensors = starts(kernel, variant, head_dim)
    check_both_starts(start, noted, num_tensors)


@pytest.mark.parametrize(("head_dim", "num_tensors"), [(64, 11), (80, 13)])
def test_the_kernels_of_one_sweep_are_given_their_parameters_each_once(head_dim: int, num_tensors: int) -> None:
    hopper = importlib.import_module("steplab.ops.attention.triton_hopper_backward")
    portable = importlib.import_module("steplab.ops.attention.triton_portable")
    noted = [
        KernelWithoutGpu(list(kernel.arg_names)) for kernel in (hopper.attention_backward, portable.attention_finish)
    ]
    tiles = replace(tiles_of("backward", "hopper"), box=max(64, columns(head_dim).box))
    given = tiles, CALL._replace(parts=columns(head_dim)), Q_SHAPE, K_SHAPE, (Q, K, K, Q, K, K, Q)
    with (
        patch.object(hopper, "attention_backward", noted[0]),
        patch.object(portable, "attention_finish", noted[1]),
        patch.object(triton_backward, "num_multiprocessors", return_value=3),
    ):
        start, finish = _starts_of_one_sweep.__wrapped__(*given)
    check_both_starts(start, noted[0], num_tensors)
    check_both_starts(finish, noted[1], 2)


def test_a_backward_pass_has_room_for_what_it_writes_for_itself() -> None:
    """50 queries of 4 heads are padded to 128, 64 columns are two parts of 32, 2 x 2 key tiles are shared."""
    hopper = tiles_of("backward", "hopper")
    own, shared = (_layout((1, 4, 50, 64), (1, heads, 130, 64), hopper) for heads in (4, 2))
    rows = 4 * 128
    assert own.parts == [rows, rows, rows * 64, 0, 2 * 4]
    assert shared.parts == [rows, rows, rows * 64, 4 * 128 * 2 * 64, 2 * (4 + 4)]
    x = torch.zeros(1, 4, 50, 64)
    *_, room = _results(x, x, x)
    assert room == ((sum(_layout(x.shape, x.shape, None).parts),), (1,), torch.float32)


@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 88, 96, 112, 128])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_plans_count_that_room(head_dim: int, num_kv_heads: int) -> None:
    shapes = (1, 4, 300, head_dim), (1, num_kv_heads, 130, head_dim)
    hopper = replace(tiles_of("backward", "hopper"), box=max(64, columns(head_dim).box))
    *parts, _ = _layout(*shapes, hopper).parts
    shared = num_kv_heads < 4
    stated = [
        each.times
        * prod(each.shape(1, num_kv_heads, 130, head_dim) if each.of_shared_keys else each.shape(1, *shapes[0][1:]))
        for each in implementation("flash_triton").workspaces
        if each.taken(2, head_dim, shared=shared)
    ]
    assert stated == [part for part in parts if part]


def test_the_preparing_kernel_is_given_its_parameters_each_once() -> None:
    home = importlib.import_module("steplab.ops.attention.triton_portable")
    noted = KernelWithoutGpu(list(home.attention_prepare.arg_names))
    shape, strides = (1, 4, 50, 64), (12800, 3200, 64, 1)
    with patch.object(home, "attention_prepare", noted):
        given = 64, 12, torch.bfloat16, torch.device("cpu"), shape, strides, strides
        start = _start_of_prepare.__wrapped__(*given)
    check_both_starts(start, noted, 6)


def check_both_starts(start: Start, noted: KernelWithoutGpu, num_tensors: int) -> None:
    tensors = [torch.zeros(8) for _ in range(num_tensors)]
    start(*tensors)
    start(*tensors)
    expected, ((_, given),) = noted.all_given(), noted.compiled
    assert [_shown(x) for x in given] == [_shown(x) for x in expected]
    constants = [name for name in noted.arg_names if name.isupper()]
    assert noted.arg_names[-len(constants) :] == constants
    pointers = [name for name in noted.arg_names if name.endswith(("_ptr", "_tiles"))]
    assert noted.arg_names[: len(pointers)] == pointers
    for name, x in zip(pointers[:num_tensors], given, strict=False):
        assert isinstance(x, torch.Tensor) == name.endswith("_ptr")
    assert given[num_tensors : len(pointers)] == (None,) * (len(pointers) - num_tensors)


def _shown(x: Any) -> object:
    if isinstance(x, torch.Tensor):
        return id(x)
    return {**vars(x), "base": id(x.base)} if hasattr(x, "base") else x
