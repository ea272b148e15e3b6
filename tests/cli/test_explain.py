import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
from tests.cli.program import Program, Result, complaint, digests, keep_result, kept_result, made_once, tiny
from tests.runs import make_run, out_of_memory
from tests.unit.explaining import foreign, op, own, profile, timing

from steplab.explain.api import explain
from steplab.records.codec import encode
from steplab.records.finding import Findings

CHAIN = [
    op("aten::silu", "elementwise", 3.0, where="blocks.*.feed_forward", calls=12),
    op("aten::mul", "elementwise", 4.0, where="blocks.*.feed_forward", calls=12),
    op("aten::mm", "matmul", 20.0, dtype="bf16", calls=60),
]
PROFILED = own({"model": "small", "precision": "bf16"}, profile(CHAIN), timing(30.0, optimizer=1.0))


@pytest.fixture
def stored(steplab: Program) -> Program:
    runs = [
        dataclasses.replace(PROFILED, id="aaaa00000000", created_utc="2026-11-21T08:00:00Z"),
        foreign(profile(CHAIN), id="bbbb00000000", created_utc="2026-11-21T07:00:00Z"),
        make_run({"model": "small"}, id="cccc00000000", created_utc="2026-11-21T09:00:00Z"),
        out_of_memory({"model": "xl"}, id="dddd00000000", created_utc="2026-11-21T10:00:00Z"),
    ]
    (steplab.cwd / "runs.jsonl").write_bytes(b"\n".join(map(encode, runs)))
    assert steplab("import", "runs.jsonl").code == 0
    return steplab


def said(result: Result) -> Findings:
    assert (result.code, result.stderr) == (0, "")
    return msgspec.json.decode(result.stdout, type=Findings)


def test_without_an_id_the_newest_run_with_a_profile_is_explained(stored: Program) -> None:
    before = digests(stored.store.parent)
    found = said(stored("explain", "--format", "json"))
    assert found.run_id == "aaaa00000000"
    assert [f.kind for f in found.findings] == ["fusable_elementwise"]
    [finding] = explain(PROFILED)
    assert found.findings[0].saves_s == pytest.approx(finding.saves_s)
    assert digests(stored.store.parent) == before


def test_a_trace_made_elsewhere_is_explained_with_code_to_write(stored: Program) -> None:
    [finding] = said(stored("explain", "bbbb", "--format", "json")).findings
    assert finding.change == "model = torch.compile(model)"


def test_the_formats_agree_and_the_files_ending_chooses_one(stored: Program) -> None:
    table = stored("explain").stdout
    assert "  steplab run --model small --precision bf16 --compile default\n" in table
    result = stored("explain", "aaaa", "--output", "why.md")
    assert (result.code, result.stdout, result.stderr) == (0, "", "wrote why.md\n")
    text = (stored.cwd / "why.md").read_text()
    assert "```\nsteplab run --model small --precision bf16 --compile default\n```" in text
    assert stored("explain", "--output", "why.json").code == 0
    assert json.loads((stored.cwd / "why.json").read_text())["schema"] == "steplab.findings/1"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("explain", "eeee"), 2, ("eeee", "steplab list")),
        (("explain", "--output", "why.html"), 2, ("html", "table", "md")),
        (("explain", "--try", "--timeout", "soon"), 2, ("'soon'",)),
        (("explain", "bbbb", "--try"), 2, ("imported trace",)),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line(
    stored: Program, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    before = digests(stored.store.parent)
    message = complaint(stored.here(*arguments), code)
    assert all(word in message for word in words), message
    assert digests(stored.store.parent) == before


def test_a_store_without_a_profile_says_how_to_make_one(filled: Program) -> None:
    message = complaint(filled.here("explain"), 2)
    assert "steplab profile" in message


# --- --try ------------------------------------------------------------------------------------------------

# On a CPU without measured bandwidth, the optimizer's gain is not predicted but still tried.
STEP = tiny(optimizer="adamw_loop", context="16")


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        program = Program(folder)
        assert program("run", *STEP).code == 0
        run_id = str(program.rows()[0]["id"])
        keep_result(program("explain", run_id, "--try", "--format", "json"), folder / "explain.json")

    return made_once(tmp_path_factory, "tried", make)


def test_trying_measures_the_step_again_and_with_each_change(tried: Path) -> None:
    result = kept_result(tried / "explain.json")
    assert result.code == 0
    found = msgspec.json.decode(result.stdout, type=Findings)
    trials = {f.kind: f.trial for f in found.findings if f.fields}
    optimizer = trials["optimizer_not_fused"]
    assert optimizer is not None
    assert optimizer.failure is None
    assert optimizer.before_s > 0
    assert optimizer.after_s is not None
    assert all(f.trial is None for f in found.findings if not f.fields)
    assert "trying the unchanged step" in result.stderr
    assert "trying optimizer adamw_fused" in result.stderr
    program = Program(tried)
    rows = {str(row["id"]): row for row in program.rows()}
    before, after = (rows[run_id] for run_id in optimizer.run_ids)
    assert (before["optimizer"], after["optimizer"]) == ("adamw_loop", "adamw_fused")
    assert after["steps"] == 30
    assert len(rows) == 2 + len({tuple(f.fields.items()) for f in found.findings if f.fields})
