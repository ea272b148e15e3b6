from statistics import median

import pytest
from tests.stored_records import stored

from steplab.ops.attention.choice_rule import choose
from steplab.records.attention import AttentionRun
from steplab.records.run import Run
from steplab.specs.attention import AttentionSpec

PORTABLE = "9db2e697ab2d"


@pytest.fixture(scope="module")
def records() -> dict[str, AttentionRun | Run]:
    names = "attention_h200", "attention_h100", "attention_triton_h200"
    benchmarks = {run.id: run for name in names for run in stored(name, AttentionRun)}
    return benchmarks | {run.id: run for name in names for run in stored(name, Run)}


def test_autos_rule_is_the_fastest_within_three_per_cent(records: dict[str, AttentionRun | Run]) -> None:
    taken: dict[tuple[str, AttentionSpec], dict[str, float]] = {}
    for record in records.values():
        if isinstance(record, AttentionRun) and record.id != PORTABLE and record.created_utc >= "2026-11-23":
            for cell in record.cells:
                samples = cell.samples("both")
                if samples and cell.spec.dim <= 128 and cell.spec.implementation not in ("plain", "flash_attn_4"):
                    taken.setdefault((record.id, cell.spec.shape), {})[cell.spec.implementation] = median(samples)
    checked = [
        times_s[chosen] / min(times_s.values())
        for (record_id, spec), times_s in taken.items()
        if len(times_s) > 1 and (chosen := rule(str(records[record_id].device_name), spec)) in times_s
    ]
    assert len(checked) >= 200
    assert max(checked) < 1.03


def rule(device: str, spec: AttentionSpec) -> str:
    return choose(
        device=device,
        dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[spec.dtype],
        head_dim=spec.dim,
        num_queries=spec.queries,
        num_keys=spec.num_keys,
        causal=spec.causal,
        grouped=spec.num_kv_heads != spec.heads,
        hopper=True,
    ).implementation
