import pytest
from tests.cli.program import Program

from steplab.records.codec import decode
from steplab.records.ddp import DdpRun

SMALL = ("--model.num-layers", "1", "--context", "16", "--steps", "3", "--warmup", "1")


def test_two_processes_are_compared_kept_and_drawn(steplab: Program) -> None:
    variants = ("--variants", "flat,sharded", "--traces", "traces", "--name", "mine")
    result = steplab("ddp", "--processes", "2", *SMALL, *variants, "--format", "json")
    assert result.code == 0, result.stderr
    rows = result.rows()
    assert [row["variant"] for row in rows] == ["no communication", "flat", "sharded 25 MB"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    for row in rows[1:]:
        assert row["num_ranks"] == 2
        assert row["step_s"] == pytest.approx(row["baseline_s"] + row["exposed_s"])
        assert row["alone_s"] > 0
        assert 0 <= row["traced_exposed_s"] <= row["traced_communication_s"]
    assert rows[2]["after_step_optimizer_bytes"] < 0.7 * rows[1]["after_step_optimizer_bytes"]
    assert sorted(path.name for path in (steplab.cwd / "traces").iterdir()) == [
        "0_no_communication.json", "1_flat.json", "2_sharded_25_MB.json"
    ]  # fmt: skip

    (listed,) = steplab("list", "--kind", "ddp", "--format", "json").rows()
    assert (listed["name"], listed["num_ok"], listed["num_ranks"]) == ("mine", 3, 2)
    shown = steplab("show", str(listed["id"]))
    assert "exposed" in shown.stdout
    record = decode(steplab("show", str(listed["id"]), "--format", "json").stdout)
    assert isinstance(record, DdpRun)
    assert record.facts
    assert record.facts.backend == "gloo"
    assert steplab("report", "--output", "page.html").code == 0
    page = (steplab.cwd / "page.html").read_text(encoding="utf-8")
    assert "Data parallelism" in page
    assert "One step of each" in page
