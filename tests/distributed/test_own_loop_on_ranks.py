from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import on_ranks
from tests.unit.test_own_loop import Small, rate, trained_plainly
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.specs.own_loop import own_loop
from steplab.specs.resolve import resolve_step

RANKS, BATCHES, ROWS = 2, 2, 6


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {"layout": "dp=2"},
        {"layout": "dp=2", "data_parallel": "overlap", "update": "overlapped"},
        {"layout": "fsdp=2", "checkpointing": "full"},
        {"layout": "fsdp=2", "reshard_after_forward": "never", "precision": "bf16"},
    ],
    ids=str,
)
def test_loops_on_ranks_train_as_the_plain_loop_on_all_batches(fields: dict[str, object], accumulation: int) -> None:
    on_ranks(RANKS, case_trains_plainly, fields | ({"accumulation": accumulation} if accumulation > 1 else {}))


def case_trains_plainly(fields: dict[str, object]) -> None:
    spec, rank = resolve_step({"model": "tiny", **fields}), dist.get_rank()
    whole = list(torch.randn(BATCHES, RANKS * ROWS, 8, generator=torch.Generator().manual_seed(1)))
    model, seen = Small(), set[torch.dtype]()
    inner: Any = model.blocks[0]
    inner[0].register_forward_hook(lambda module, *given: seen.add(module.weight.dtype))
    names = {"model": model, "device": torch.device("cpu"), "lr": rate(sgd=False)}
    names["batches"] = [batch[rank * ROWS :][:ROWS] for batch in whole]
    with Calls() as calls:
        exec("\n".join(own_loop(spec, "cpu")), names)
    bf16 = spec.precision == "bf16"
    expected = trained_plainly(whole, autocast=bf16, sgd=False)
    rtol, atol = (1e-2, 5e-3) if bf16 else (1e-5, 1e-6)
    for value, right in zip(model.parameters(), expected.parameters(), strict=True):
        whole_value = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole_value, right, rtol=rtol, atol=atol)
    if spec.layout.fsdp > 1:
        assert calls.counts["c10d::_reduce_scatter_base_"] == BATCHES * (len(model.blocks) + 1)
        assert seen == {torch.bfloat16 if bf16 else torch.float32}
