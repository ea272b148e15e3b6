import shutil
import subprocess
from functools import cache, partial
from pathlib import Path

import pytest
from cyclopts import App
from tests.first import first

from steplab.cli.app import app, main
from steplab.store.database import Store

generated = cache(partial(App.generate_completion, app))


@pytest.fixture(autouse=True)
def _each_script_is_generated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(App, "generate_completion", lambda _, **shell: generated(**shell))


def test_bash_completes_commands_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "steplab.bash"
    assert main(["completion", "--shell", "bash", "--output", str(script)]) == 0
    assert str(script) in capsys.readouterr().err
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")

    def completed(*words: str) -> set[str]:
        listed = " ".join(f"'{word}'" for word in words)
        function = "$(complete -p steplab | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
        code = f"source {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; COMP_LINE='{' '.join(words)}'; "
        code += f"COMP_POINT=${{#COMP_LINE}}; {function}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        found = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=60, check=True)
        return {line.strip() for line in found.stdout.splitlines()}

    assert {"run", "report"} <= completed("steplab", "r")
    assert "--precision" in completed("steplab", "run", "--prec")
    assert "markdown" not in completed("steplab", "report", "--format", "")


@pytest.mark.parametrize("shell", first(1, ["bash", "zsh", "fish"]))
def test_a_script_replaces_an_earlier_one_and_no_other_file(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, notes = tmp_path / "script", tmp_path / "notes.txt"
    write = ["completion", "--shell", shell, "--output"]
    assert main([*write, str(script)]) == main([*write, str(script)]) == 0
    notes.write_text("mine")
    assert main([*write, str(notes)]) == 2
    assert notes.read_text() == "mine"
    assert "add --force" in capsys.readouterr().err
    assert main([*write, str(notes), "--force"]) == 0
    assert notes.read_text() == script.read_text()


def test_a_script_never_takes_the_place_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store.db"
    monkeypatch.setenv("STEPLAB_STORE", str(store))
    with Store.open(store, write=True):
        pass
    before = store.read_bytes()  # with what closing it moved out of its log
    assert main(["completion", "--shell", "bash", "--output", str(store), "--force"]) == 2
    assert store.read_bytes() == before


def test_a_shell_that_is_not_known_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/bin/nothing")
    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", _unknown)
    monkeypatch.setattr("cyclopts.completion.detect_shell", _unknown)
    assert main(["completion"]) == 2
    assert "set --shell to bash" in capsys.readouterr().err


def _unknown() -> str:
    from cyclopts.completion.detect import ShellDetectionError

    raise ShellDetectionError


def test_the_shells_own_files_are_under_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert main(["completion", "--shell", "bash"]) == 0
    assert "steplab" in (tmp_path / ".local/share/bash-completion/completions/steplab").read_text()
