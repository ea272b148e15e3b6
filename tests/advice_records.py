import dataclasses
from typing import Any

from tests.runs import ENVIRONMENT

from steplab.records.advice import Advice, Tried
from steplab.records.comparison import Ratio
from steplab.specs.resolve import resolve_step


def ratio(a: float, b: float, decision: Any) -> Ratio:
    return Ratio(
        a=a, b=b, num_a=30, num_b=30, ratio=b / a, low=b / a - 0.01, high=b / a + 0.01, p=0.002,
        threshold=0.01, decision=decision,
    )  # fmt: skip


def some_advice() -> Advice:
    spec = resolve_step({"model": "small", "context": 512, "steps": 30})
    return Advice(
        id="aaaa00000000",
        created_utc="2026-11-22T09:00:00Z",
        steplab_version="0.1.0",
        environment=ENVIRONMENT,
        spec=spec,
        best=dataclasses.replace(spec, precision="bf16"),
        start_id="bbbb00000000",
        best_id="cccc00000000",
        start_s=0.040,
        best_s=0.020,
        overall=ratio(0.040, 0.020, "lower"),
        tried=(
            Tried(
                field="precision",
                value="bf16",
                code=("with torch.autocast(device.type, dtype=torch.bfloat16):", "    loss = model(batch)"),
                numerics="matrix products take bf16",
                predicted_share=0.45,
                predicted_by="plan time",
                ratio=ratio(0.040, 0.020, "lower"),
                kept=True,
                peak_bytes=8 * 2**30,
                before_bytes=10 * 2**30,
                run_id="cccc00000000",
                base_id="bbbb00000000",
            ),
            Tried(field="compile", value="block", code=("…",), ratio=ratio(0.020, 0.021, "higher")),
            Tried(field="loss", value="fused", code=("…",), failure="out of memory: asked 8 GiB"),
        ),
        untried=("compile default",),
    )
