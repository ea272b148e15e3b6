"""One rank on a GPU, started by torchrun, runs tests/distributed/layout_cases by NCCL.

PYTHONPATH=src:. torchrun --nproc-per-node 2 -m tests.gpu.layout_ranks
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from tests.distributed import layout_cases as cases

LAYOUTS = {
    2: ["dp=2", "fsdp=2", "tp=2", "pp=2"],
    4: ["fsdp=4", "dp=2,fsdp=2", "dp=2,tp=2", "tp=2,fsdp=2", "tp=4", "pp=2,fsdp=2", "pp=2,tp=2", "pp=2,dp=2"],
}
FIELDS: list[dict[str, object]] = [
    {},
    {"checkpointing": "full"},
    {"checkpointing": "selective"},
    {"reshard_after_forward": "never"},
    {"accumulation": 2},
    {"accumulation": 2, "reshard_after_forward": "never"},
]


def main() -> int:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
    size = dist.get_world_size()
    for layout in LAYOUTS[size]:
        for fields in FIELDS:
            # An option that would change nothing of a layout is refused, and so are micro-steps in a pipeline.
            if ("fsdp" in layout or "reshard_after_forward" not in fields) and not (
                "pp" in layout and "accumulation" in fields
            ):
                _run(f"{layout} {fields}", partial(cases.case_trains_alike, layout, fields))
        for fields in FIELDS[:3]:
            _run(f"{layout} {fields} compiled", partial(cases.case_compiled_trains_alike, layout, fields))
        _run(f"{layout} bf16", partial(cases.case_bf16_is_autocast_over_fp32_weights, layout))
    layout = "pp=2" if size == 2 else "pp=2,fsdp=2"
    fields = {"pipeline_schedule": "interleaved", "model.num_layers": 4}
    _run(f"{layout} interleaved", partial(cases.case_trains_alike, layout, fields))
    _run(f"{layout} gpipe", partial(cases.case_trains_alike, layout, {"pipeline_schedule": "gpipe"}))
    if size == 2:
        _run("another number of ranks", cases.case_another_number_of_ranks)
    dist.destroy_process_group()
    return 0


def _run(name: str, case: Callable[[], None]) -> None:
    started = time.perf_counter()
    try:
        torch.manual_seed(0)
        case()
        dist.barrier(device_ids=[torch.cuda.current_device()])
    except BaseException:
        print(f"rank {dist.get_rank()}: FAILED {name}\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    if dist.get_rank() == 0:
        print(f"ok {time.perf_counter() - started:6.1f} s  {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
