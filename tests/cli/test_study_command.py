from pathlib import Path

import pytest
from tests.cli.program import Program, keep_result, kept_result, made_once

STUDY = """
description = "a little of everything"
[[grid]]
model = "tiny"
"model.num_layers" = 1
device = "cpu"
batch = 1
context = 8
warmup = 0
steps = 6
[[memory]]
model = "tiny"
"model.num_layers" = 1
device = "cpu"
batch = 1
context = 16
warmup = 0
steps = 2
[[attention]]
sequence = 16
dim = 16
implementation = "plain"
device = "cpu"
repeats = 2
errors = false
[[ddp]]
gpus = 1000
"""


@pytest.fixture(scope="session")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def measure(folder: Path) -> None:
        program = Program(folder)
        program.write("little.toml", STUDY)
        keep_result(program("study", "little.toml", "--output", "page.html"), folder / "study.json")

    return made_once(tmp_path_factory, "studied", measure)


def test_one_command_measures_all_and_writes_the_page(studied: Path) -> None:
    result = kept_result(studied / "study.json")
    assert result.code == 0, result.stderr
    page = (Program(studied).cwd / "page.html").read_text()
    for chapter in ("Step time", "Memory", "Attention"):
        assert f">{chapter}<" in page
    assert "a little of everything" in page
    answer = result.stdout.splitlines()[0]
    assert len(answer) > 20
    assert answer in page.replace("\u00a0", " "), "what the page says first is printed too"
    assert "not measured: data parallelism" in page
    assert "[1/4]" in result.stderr
    assert "[4/4] data parallelism: not measured" in result.stderr


def test_it_resumes_with_what_is_missing_alone(studied: Path) -> None:
    program = Program(studied)
    again = program("study", "little.toml", "--resume")
    assert "3 measurements already made, 1 to go" in again.stderr
    kinds = [row["kind"] for row in program("list", "--study", "little", "--format", "json").rows()]
    assert sorted(kinds) == ["attention", "memory", "run"]


def test_it_is_reported_by_its_name(studied: Path) -> None:
    report = Program(studied)("report", "--study", "little")
    assert report.code == 0, report.stderr
    assert "tiny" in report.stdout
    assert "plain" in report.stdout
