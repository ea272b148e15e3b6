"""The layouts of N GPUs side by side: step time and peak memory, measured and predicted. Some 20 seconds a layout.

    python -m benchmarks.layout_study 4 [--store layouts.db] [--layouts "fsdp=4; pp=4"] [STEP OPTIONS ...]

Each is measured in processes of its own, as by `steplab run --layout`, stored, and printed when it has ended: the
record, the median step beside the plan's, tokens a second, MFU, and the peak memory of rank 0 beside the plan's. Step
options that are given replace the defaults: --model 2.7b --context 2048 --batch 4 --precision bf16 --compile default
--attention sdpa. Further fields may follow a layout, as in "fsdp=4 checkpointing=full".
"""

import argparse
from typing import Any

import steplab
from steplab.costs.rates import gpu_named
from steplab.errors import SteplabError
from steplab.plan.dry_run.machine import Gathering
from steplab.plan.layout.links import machine_of
from steplab.plan.layout.memory import memory_by_rank
from steplab.plan.layout.time import LayoutClock
from steplab.plan.memory import workspace_of
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.specs.hardware import find_hardware

LAYOUTS = {
    2: ["fsdp=2", "tp=2", "pp=2", "dp=2", "fsdp=2 reshard_after_forward=never", "fsdp=2 checkpointing=full"],
    4: ["dp=4", "fsdp=4", "dp=2,fsdp=2", "tp=4", "tp=2,fsdp=2", "pp=4", "pp=2,fsdp=2", "pp=2,tp=2"],
    8: ["dp=8", "fsdp=8", "dp=2,fsdp=4", "tp=8", "tp=2,fsdp=4", "pp=8 batch=8", "pp=4,fsdp=2", "pp=2,tp=2,fsdp=2"],
}
"""By the number of GPUs."""
DEFAULTS = {
    "model": "2.7b", "context": "2048", "batch": "4", "precision": "bf16", "compile": "default", "attention": "sdpa",
}  # fmt: skip
COLUMNS = f"{'layout':40} {'record':12} {'step ms':>8} {'plan':>8} {'tokens/s':>9} {'MFU %':>6} {'GiB':>6} {'plan':>6}"


def predicted(run: Run) -> tuple[float | None, float | None]:
    """The step's seconds and rank 0's peak bytes by the plan; None where it predicts none."""
    assert run.spec is not None
    assert run.environment is not None
    hardware = find_hardware(run.environment.device.name)
    if hardware is None:
        return None, None
    gathering = Gathering(fused_norms=not run.environment.torch.startswith("2.11"))
    try:
        time = LayoutClock(gpu_named(hardware.name), machine_of(hardware, None)).time(run.spec)
        first = memory_by_rank(run.spec, workspace_of(hardware.name).value, gathering=gathering)[0]
    except SteplabError:
        return None, None
    return (time.seconds if time else None), float(first.peak_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, choices=sorted(LAYOUTS))
    parser.add_argument("--store")
    parser.add_argument("--layouts", type=lambda text: text.split(";"), help="instead of all, separated by ;")
    options, given = parser.parse_known_args()
    fields: dict[str, Any] = DEFAULTS | {
        name.lstrip("-").replace("-", "_"): value for name, value in zip(given[::2], given[1::2], strict=True)
    }
    print(COLUMNS, flush=True)
    for layout in map(str.strip, options.layouts or LAYOUTS[options.gpus]):
        try:
            told = shown(steplab.measure(store=options.store, **fields | fields_of(layout)))
        except SteplabError as refusal:
            told = str(refusal)
        print(f"{layout:40} {told}", flush=True)


def fields_of(layout: str) -> dict[str, str]:
    """The fields of a layout and what follows it."""
    name, *more = layout.split()
    return {"layout": name} | dict(one.split("=") for one in more)


def shown(run: Run) -> str:
    """The figures of a record, or its failure."""
    if run.failure:
        return f"{run.id} {run.failure.kind}: {run.failure.message}"
    row, (plan_s, plan_bytes) = run_row(run), predicted(run)
    scaled = [
        (row["step_time_s"], 1e3, "8.1f"), (plan_s, 1e3, "8.1f"), (row["tokens_per_s"], 1, "9.0f"),
        (row["mfu"], 100, "6.1f"), (row["peak_allocated_bytes"], 2**-30, "6.1f"), (plan_bytes, 2**-30, "6.1f"),
    ]  # fmt: skip
    figures = [
        f"{value * by:{form}}" if isinstance(value, int | float) else "–".rjust(int(form[0]))
        for value, by, form in scaled
    ]
    return " ".join([run.id, *figures])


if __name__ == "__main__":
    main()
