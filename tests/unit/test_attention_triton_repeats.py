import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from steplab.ops.attention import triton_repeats
from steplab.ops.attention.triton_repeats import (
    Address,
    Kind,
    Made,
    forget,
    hooked,
    in_a_row,
    kind_of,
    laid_out_as,
    launcher_of,
    refuse_while_capturing,
)
from steplab.ops.errors import Unsupported


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    forget()
    yield
    forget()


CPU = torch.device("cpu")


def a_kind(stream: int | None = 7) -> Kind:
    return Kind(stream, CPU, ())


def test_a_call_that_is_known_is_made_again_and_no_other() -> None:
    made: list[str] = []
    kind, x, y = a_kind(), torch.zeros(1), torch.zeros(1)
    kind.keep([x], [lambda: made.append("first"), lambda: made.append("second")])
    assert kind.made_again([x])
    assert made == ["first", "second"]
    assert not kind.made_again([y])
    assert not a_kind().made_again([x])
    assert made == ["first", "second"]


def test_a_call_without_a_stream_or_whose_launch_cannot_be_repeated_is_not_kept() -> None:
    x = [torch.zeros(1)]
    for kind, launches in ((a_kind(None), [lambda: None]), (a_kind(), [lambda: None, None])):
        kind.keep(x, launches)
        assert not kind.made_again(x)


def test_no_more_calls_are_kept_than_are_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_repeats, "MOST_KEPT", 3)
    kind, tensors = a_kind(), [torch.zeros(1) for _ in range(4)]
    for x in tensors:
        kind.keep([x], [lambda: None])
    assert [kind.made_again([x]) for x in tensors] == [False, False, False, True]


def test_no_more_kinds_are_kept_than_are_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_repeats, "MOST_KEPT", 3)
    kinds = [kind_of(like_the_first, (torch.zeros(1, 1, i, 16),) * 3) for i in range(1, 5)]
    again = [kind_of(like_the_first, (torch.zeros(1, 1, i, 16),) * 3) for i in (4, 1)]
    assert again[0] is kinds[3]
    assert again[1] is not kinds[0]


def test_nothing_is_made_again_past_those_who_want_to_be_told_of_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, x = a_kind(), [torch.zeros(1)]
    kind.keep(x, [lambda: None])
    assert not hooked()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    assert hooked()
    assert not kind.made_again(x)


def like_the_first(q: torch.Tensor, *others: torch.Tensor) -> tuple[Made, ...]:
    return laid_out_as(q), in_a_row(q.shape[:3], torch.float32)


def test_launches_of_calls_on_a_cpu_are_not_kept() -> None:
    x = torch.zeros(1, 1, 4, 16)
    assert kind_of(like_the_first, (x, x, x), True).stream is None


@pytest.mark.parametrize("seen_as", ["itself", "transposed", "expanded", "sliced"])
def test_tensors_are_made_as_torch_makes_those_like_the_inputs(seen_as: str) -> None:
    whole = torch.zeros(2, 3, 4, 16, dtype=torch.float16)
    views = {
        "transposed": whole.transpose(1, 2),
        "expanded": whole[:, :1].expand(2, 3, 4, 16),
        "sliced": whole[..., :8],
    }
    x = views.get(seen_as, whole)
    like, row = kind_of(like_the_first, (x, x, x)).tensors()
    right = torch.empty_like(x)
    assert (like.shape, like.stride(), like.dtype) == (right.shape, right.stride(), right.dtype)
    assert (row.shape, row.stride(), row.dtype) == (
        x.shape[:3],
        (x.shape[1] * x.shape[2], x.shape[2], 1),
        torch.float32,
    )


class OnDevice(torch.Tensor):
    is_cuda = True

    def get_device(self) -> int:
        return 0


def test_kinds_or_addresses_differ_wherever_a_launch_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_repeats, "_stream", lambda device: 7)
    room = torch.zeros(4, 1024, dtype=torch.bfloat16)

    def key(*shape: int, at: int = 0, causal: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
        whole = room.view(dtype).as_subclass(OnDevice)
        q, k, v, o = (whole[i, at : at + 512].view(shape) for i in range(4))
        return kind_of(like_the_first, (q, k, v, o), causal), *(x.data_ptr() for x in (q, k, v, o))

    first = key(2, 4, 64)
    assert first == key(2, 4, 64)
    assert first[0].stream == 7
    others = [key(4, 2, 64), key(2, 4, 64, at=8), key(2, 4, 64, causal=False), key(2, 4, 64, dtype=torch.float16)]
    monkeypatch.setattr(triton_repeats, "_stream", lambda device: 8)
    others.append(key(2, 4, 64))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert key(2, 4, 64)[0].stream is None, "of a device that is not current"
    assert len({first, *others}) == 6


def test_a_first_call_while_a_graph_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_while_capturing(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unsupported, match=r"first call of 'flash_triton' .* call it once before"):
        refuse_while_capturing(torch.device("cuda:0"))


# --- with Triton's launcher, and a driver that notes what it is asked for ------------------------------------------

SIGNATURE = {0: "tensordesc<fp16[1,64]>", 1: "*fp32", 2: "i32", 3: "constexpr"}
DESCRIPTOR = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 64], "fp4_padded": False}


class Compiled(SimpleNamespace):
    pass


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def encode(*given: Any) -> str:
        asked.append(given)
        return f"descriptor of {given[0]}"

    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    return asked


def compiled_kernel(started: list[tuple[Any, ...]], **metadata: int) -> Compiled:
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.arg_annotations, run.kernel_signature = ["annotations"], b"signature"
    run.gsan_enabled = False  # from Triton 3.9 on
    scratch = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    vars(run).update(scratch)

    def in_c(*given: Any) -> None:
        started.append(given)

    run.launch = nvidia.wrap_handle_tensordesc(in_c, SIGNATURE, [DESCRIPTOR])
    return Compiled(
        run=run,
        src=SimpleNamespace(signature=SIGNATURE),
        metadata=SimpleNamespace(**scratch | metadata, tensordesc_meta=[DESCRIPTOR]),
        function=99,
        packed_metadata=(4, 1, 0),
    )


def arguments(at: int) -> list[Any]:
    shape = {"shape": [10, 64], "strides": [64, 1], "padding": "zero", "round_f32_to_tf32": False}
    return [SimpleNamespace(base=Address(at), **shape), 2 * at, 5, True]


def test_a_ready_launch_gives_the_driver_what_tritons_gives_and_encodes_nothing(encoded: list[tuple[Any, ...]]) -> None:
    started: list[tuple[Any, ...]] = []
    compiled = compiled_kernel(started)
    launcher = launcher_of(compiled, (3, 1, 1))
    assert launcher is not None
    compiled.run(3, 1, 1, 7, compiled.function, compiled.packed_metadata, None, None, None, *arguments(16))
    launch, other = launcher.ready(7, arguments(16)), launcher.ready(8, arguments(32))
    assert len(started) == 1, "ready, and not started"
    assert len(encoded) == 3
    launch()
    launch()
    other()
    assert started[0] == started[1] == started[2]
    assert started[3] != started[0]
    assert "descriptor of 16" in str(started[0])
    assert "descriptor of 32" in str(started[3])
    assert len(encoded) == 3


def test_there_is_no_ready_launch_where_triton_is_built_otherwise_or_memory_is_made_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launcher_of(compiled_kernel([], global_scratch_size=64), (1, 1, 1)) is None
    assert launcher_of({(1, 1, 1): print}, (1, 1, 1)) is None
    monkeypatch.delattr(nvidia, "wrap_handle_tensordesc")
    assert launcher_of(compiled_kernel_without_wrapping(), (1, 1, 1)) is None


def compiled_kernel_without_wrapping() -> Compiled:
    metadata = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)
    return Compiled(run=SimpleNamespace(launch=print), src=None, metadata=metadata)
