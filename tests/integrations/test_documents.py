import json
import os
import re
import shlex
from pathlib import Path

import pytest
from tests.cli.program import REPOSITORY
from tests.cli.test_readme import Piece, blocks, commands
from tests.runs import make_run
from tests.stored_lines import fill

from steplab.cli.app import main

PIECES = [
    pytest.param(block, id=f"{name}-{block.line}")
    for name in ("trainers", "report")
    for block in blocks((REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    if name == "trainers" or "track" in block.text
]


@pytest.mark.parametrize("block", PIECES)
def test_a_piece_works(block: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run({}, name="a run")
    fill(tmp_path / "store.db", run)
    monkeypatch.setenv("STEPLAB_STORE", str(tmp_path / "store.db"))
    monkeypatch.chdir(tmp_path)
    if block.language == "python":
        for library in re.findall(r"from steplab\.integrations\.(transformers|lightning)", block.text):
            pytest.importorskip(library, reason=f"{library} is missing: pip install {library}")
        exec(compile(block.text, "docs", "exec"), {})
        for written in tmp_path.glob("tracked/*/run.json"):
            one = json.loads(written.read_text(encoding="utf-8"))
            assert (one["params"]["model"], one["metrics"]["step_time_s"]) == ("small", run.median_s)
        return
    assert block.language == "sh"
    for line in commands(block):
        words = shlex.split(line.text)
        while "=" in words[0]:
            monkeypatch.setitem(os.environ, *words.pop(0).split("=", 1))
        if "mlflow" in words:
            pytest.importorskip("mlflow", reason="mlflow is missing: pip install 'steplab[mlflow]'")
        assert main(words[1:]) == 0
