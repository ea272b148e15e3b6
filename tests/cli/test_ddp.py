from pathlib import Path

import pytest
from tests.cli.program import Program

from steplab.cli.app import main
from steplab.records.codec import decode
from steplab.records.ddp import DdpRun

SMALL = ("--model.num-layers", "1", "--context", "16", "--steps", "3", "--warmup", "1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--variants", "magic"), "variant 'magic' is not known; choose some of none, naive, flat"),
        (("--bucket-sizes", "0"), "a bucket size must be a positive number of MB, not 0"),
        (("--compile", "default"), "delivers all gradients at the end; choose one of off, block"),
        (("--processes", "1"), "processes must be at least 2, not 1"),
        (("--gpus", "2", "--processes", "2"), "not both"),
        (("--precision", "fp16"), "use --precision bf16"),
        (("--transport", "peer_copy"), "transport peer_copy on a CPU is not supported"),
        (("--transport", "magic"), "transport 'magic' is not known; choose some of collectives, peer_copy"),
        (("--variants", "flat,torch_ddp", "--transport", "collectives"), "add bucketed or sharded to --variants"),
        (("--variants", "flat,sharded", "--update", "after"), "add overlap or bucketed to --variants"),
        (("--variants", "flat,bucketed:5", "--bucket-sizes", "1"), "bucket sizes have no effect on flat, bucketed:5"),
        (("--microbatches", "2"), "Unknown option"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert main(["ddp", *arguments, "--store", str(tmp_path / "store.db")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


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
