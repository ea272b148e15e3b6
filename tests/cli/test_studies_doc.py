import re
import shlex

import pytest
from cyclopts import CycloptsError
from tests.cli.program import REPOSITORY

from steplab.cli.app import app
from steplab.specs.resolve import resolve_grid
from steplab.specs.study import STUDIES, load_study, preset_names

TEXT = (REPOSITORY / "docs" / "studies.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    set(re.findall(r"`(steplab [^`]+)`", TEXT)) | set(re.findall(r"^    (steplab .+)$", TEXT, re.MULTILINE))
)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "NAME" not in command])
def test_a_command_is_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    if len(words) == 1:
        return  # a command named in a sentence
    try:
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        pytest.fail(f"{command}\n{error}")
    if words[0] == "study":
        load_study(words[1], bound.arguments["step"].grid() if "step" in bound.arguments else {})
    elif words[0] == "sweep":
        assert resolve_grid(bound.arguments["step"].grid())


def test_each_study_is_described() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert set(preset_names(STUDIES)) <= set(re.findall(r"`([\w-]+)`", " ".join(row.split("|")[1] for row in rows)))


def test_the_study_in_the_page_is_one(tmp_path: object) -> None:
    (example,) = re.findall(r'(?:^    .*\n|^\n)*^    description = "how far.*\n(?:^    .*\n|^\n)*', TEXT, re.MULTILINE)
    path = f"{tmp_path}/mine.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(line[4:] for line in example.splitlines()))
    study = load_study(path, {})
    assert study.gpus == 1
    assert len(study.cells) == 8
    assert [part.kind for part in study.parts] == ["profile", "profile", "attention"]
