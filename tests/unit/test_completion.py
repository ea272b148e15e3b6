import shutil
import subprocess
from pathlib import Path

import pytest

from steplab.cli.app import main


def test_bash_completes_commands_options_and_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["completion", "--shell", "bash"]) == 0
    script = tmp_path / ".local/share/bash-completion/completions/steplab"
    assert "steplab" in script.read_text()
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
