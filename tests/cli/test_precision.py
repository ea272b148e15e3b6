import json

from tests.cli.program import Program, tiny


def test_sums_are_printed_as_torch_prints_them_and_kept(steplab: Program) -> None:
    result = steplab("precision", "--only", "accumulation", "--device", "cpu")
    assert result.code == 0
    lines = [[word.strip() for word in line.split("  ") if word] for line in result.stdout.splitlines() if "+=" in line]
    shown = {words[0]: words[1] for words in lines}
    assert shown["fp32 += fp32"] == "10.0001"
    assert shown["fp16 += fp16"] == "9.9531"
    assert shown["fp32 += fp16"] == "10.0021"
    assert shown["fp32 += fp16 cast to fp32"] == "10.0021"
    record_id = result.stderr.partition("steplab report ")[2].split()[0]
    assert "9.9531" in steplab("show", record_id).stdout
    assert [row["id"] for row in steplab("list", "--kind", "precision", "--format", "json").rows()] == [record_id]
    assert steplab("list", "--kind", "run").stdout == "no records\n"
    assert record_id in steplab("list").stdout


def test_a_step_is_audited_and_timed_side_by_side(steplab: Program) -> None:
    options = tiny(model="toy", precision="bf16", steps="1")
    result = steplab("precision", *options, "--format", "json", "--name", "mine")
    assert result.code == 0
    found = json.loads(result.stdout)
    modules = {row["module"]: row for row in found["audit"]}
    assert (modules["fc1"]["parameters"], modules["fc1"]["outputs"], modules["fc1"]["gradients"]) == (
        "float32",
        "bfloat16",
        "float32",
    )
    (timed,) = found["timings"]
    assert timed["step_time_s"] > 0
    assert timed["speed_up"] is None  # there is no fp32 to compare with
    steplab("report", "--output", "page.html")
    page = (steplab.cwd / "page.html").read_text()
    assert "One step in each precision" in page
    assert "bf16 autocast" in page
