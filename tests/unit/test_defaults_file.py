import os
from pathlib import Path
from typing import Any

import pytest
from tests.cli.program import REPOSITORY
from tests.cli.test_readme import blocks

from steplab.cli.app import app, main
from steplab.errors import Remark


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    return tmp_path


def asked(*words: str) -> dict[str, Any]:
    _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    return bound.arguments


def test_a_table_has_the_defaults_of_its_command(project: Path) -> None:
    (project / "steplab.toml").write_text(
        'store = "runs.db"\n[run]\nmodel = "small"\n"model.num_layers" = 2\nsteps = 7\ntimeout = "5min"\n'
        '[plan.memory]\ngpu = "H100 SXM"\n'
    )
    run = asked("run", "--steps", "3")
    measured = run["measured"]
    assert measured.step.fields() == {"model": "small", "model.num_layers": "2", "steps": "3"}
    assert measured.timeout == "5min"
    assert run["out"].store == project / "runs.db"
    assert asked("plan", "memory")["gpu"] == "H100 SXM"
    assert "measured" not in asked("memory", "--store", "other.db")
    assert asked("memory", "--store", "other.db")["out"].store == Path("other.db")


def test_the_example_in_the_docs_is_understood(project: Path) -> None:
    pieces = list(blocks((REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8")))
    (example,) = (piece.text for piece in pieces if piece.language == "toml")
    (project / "steplab.toml").write_text(example)
    assert asked("run")["measured"].step.fields()["model.num_layers"] == "6"
    assert asked("sweep")["step"].grid()["context"] == ["128", "256"]
    assert asked("plan", "memory")["gpu"] == "H100 SXM"
    for piece in pieces:
        if piece.language == "sh":
            asked(*piece.text.split()[1:])


def test_a_file_that_anyone_may_have_put_there_is_not_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /tmp/steplab.toml for work below /tmp: `model = "http.server:test"` would open a port to the network."""
    (project / "steplab.toml").write_text("[run]\nsteps = 7\n")
    others = project.stat().st_uid + 1
    monkeypatch.setattr("os.getuid", lambda: others)
    monkeypatch.setattr("steplab.cli.defaults._ROOT", others)
    assert asked("run")["measured"].step.fields()["steps"] == "7"  # of a colleague, in a folder that is not open to all
    project.chmod(0o777)
    with pytest.warns(Remark, match="is ignored: another user owns it"):
        given = asked("run")
    assert "measured" not in given or "steps" not in given["measured"].step.fields()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone gives files to others")
@pytest.mark.parametrize("what", ["a link", "a link to nowhere", "a link to what only root reads", "a broken file"])
def test_what_another_user_put_into_a_shared_folder_stops_nothing(project: Path, what: str) -> None:
    project.chmod(0o1777)
    mine, there = project / "below" / "mine.toml", project / "steplab.toml"
    mine.write_text("[run]\nsteps = 7\n")
    if what == "a broken file":
        there.write_text("x = [")
        (project / "pyproject.toml").write_text("x = [")
    else:
        there.symlink_to({"a link": mine, "a link to nowhere": project / "gone"}.get(what, Path("/proc/1/mem")))
    os.lchown(there, 4321, -1)
    with pytest.warns(Remark, match="is ignored: another user owns it"):
        given = asked("run")
    assert "measured" not in given or "steps" not in given["measured"].step.fields()


def test_the_nearest_file_is_read_alone(project: Path) -> None:
    (project / "steplab.toml").write_text("[run]\nsteps = 7\n")
    assert asked("run")["measured"].step.fields()["steps"] == "7"
    (project / "below" / "steplab.toml").write_text("[run]\nwarmup = 2\n")
    assert asked("run")["measured"].step.fields() == {"warmup": "2"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[rum]\nmodel = "tiny"', ("[rum]", "did you mean [rm]?")),
        ('[plan.memry]\nmodel = "tiny"', ("[memry]", "did you mean [memory]?")),
        ('model = "tiny"', ("'model' is in no command's table", "only store may be")),
        ('format = "csv"', ("'format' is in no command's table",)),
        ('[run]\nmodle = "tiny"', ("'modle' in [run] is not an option of `steplab run`; did you mean 'model'?",)),
        (
            "[plan.memory]\nwholly_other = 3",
            ("'wholly_other' in [plan.memory] is not an option", "`steplab plan memory --help`"),
        ),
        ("[run]\ncontext = [1, 2]", ("context",)),
        ('[run]\noutput = "x.json"', ("'output'", "--output")),
        ("[run", ("cannot read",)),
    ],
)
def test_a_mistake_is_told_with_the_file(
    project: Path, capsys: pytest.CaptureFixture[str], text: str, told: tuple[str, ...]
) -> None:
    (project / "steplab.toml").write_text(text)
    command = ["plan", "memory"] if "plan" in text else ["run"]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(part in line for part in (*told, str(project / "steplab.toml")))
