import dataclasses
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.cli.program import REPOSITORY, Program
from tests.cli.test_readme import blocks, commands
from tests.first import first
from tests.runs import make_run
from tests.unit.test_comparing import slower

from steplab.cli.app import app
from steplab.records.codec import encode
from steplab.records.run import Run

TEXT = (REPOSITORY / "docs" / "compare.md").read_text(encoding="utf-8")
JOBS = REPOSITORY / "examples" / "ci"
RUN = make_run({"model": "tiny", "steps": "30"}, id="aaaa00000000")
UNDECIDED, REGRESSION = 3, 4


@pytest.fixture
def stored(reader: Program) -> Program:
    again = dataclasses.replace(RUN, id="bbbb00000000", created_utc="2026-11-22T08:00:00Z")
    (reader.cwd / "runs.jsonl").write_bytes(b"\n".join(map(encode, (RUN, again))))
    assert reader("import", "runs.jsonl").code == 0
    return reader


def test_every_command_of_the_chapter_works(stored: Program) -> None:
    pieces = [line for block in blocks(TEXT) if block.language == "sh" for line in commands(block)]
    assert len(pieces) >= 9
    for piece in pieces:
        result = stored(*shlex.split(piece.text)[1:])
        assert result.code == 0, f"{piece}\n{result.stderr}"


def scripts(name: str) -> str:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    job = yaml.safe_load((JOBS / name).read_text(encoding="utf-8"))
    if name == "github.yml":
        return "\n".join(step["run"] for step in job["jobs"]["step-time"]["steps"] if "run" in step)
    assert job["step-time"]["allow_failure"]["exit_codes"] == UNDECIDED
    return "\n".join(job["step-time"]["script"])


def ended_job(stored: Program, name: str, measured: Run) -> subprocess.CompletedProcess[str]:
    script = "\n".join(line for line in scripts(name).splitlines() if not line.startswith("steplab run"))
    assert stored("export", "bbbb", "--output", "baseline.jsonl").code == 0
    measured = dataclasses.replace(measured, id="cccc00000000", created_utc="2026-11-23T08:00:00Z")
    (stored.cwd / "new.jsonl").write_bytes(encode(measured))
    assert stored("import", "new.jsonl").code == 0
    summary = stored.cwd / "summary.md"
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=stored.cwd,
        env=os.environ | stored.environment | {"GITHUB_STEP_SUMMARY": str(summary)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("name", "slowdown", "code"), [("github.yml", 1.5, REGRESSION), ("gitlab.yml", 1.0, 0)])
def test_a_job_fails_for_a_regression_alone(stored: Program, name: str, slowdown: float, code: int) -> None:
    ended = ended_job(stored, name, slower(RUN, slowdown))
    assert ended.returncode == code, ended.stderr
    assert "<!doctype html>" in (stored.cwd / "comparison.html").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("name", first(1, ["gitlab.yml", "github.yml"]))
def test_a_job_whose_baseline_is_of_another_step_fails(stored: Program, name: str) -> None:
    assert RUN.spec is not None
    other = dataclasses.replace(RUN, spec=dataclasses.replace(RUN.spec, context=2 * RUN.spec.context))
    ended = ended_job(stored, name, other)
    assert ended.returncode not in (0, REGRESSION)
    assert "do not match" in ended.stderr
    assert (name, ended.returncode) != ("gitlab.yml", UNDECIDED)  # which it would let pass


@pytest.mark.parametrize("file", sorted(JOBS.glob("*.yml")), ids=lambda file: file.name)
def test_what_a_job_measures_is_understood(file: Path) -> None:
    lines = re.findall(r"steplab run [^&\n]*", file.read_text(encoding="utf-8"))
    assert len(lines) == 2
    for line in lines:
        app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
