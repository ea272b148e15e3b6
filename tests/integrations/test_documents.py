import re
from pathlib import Path

import pytest
from tests.cli.program import REPOSITORY
from tests.cli.test_readme import Piece, blocks
from tests.runs import make_run
from tests.stored_lines import fill

PIECES = [
    pytest.param(block, id=f"{name}-{block.line}")
    for name in ("trainers", "report")
    for block in blocks((REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    if block.language == "python" and (name == "trainers" or "track" in block.text)
]


@pytest.mark.parametrize("block", PIECES)
def test_a_piece_works(block: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run({}, name="a run")
    fill(tmp_path / "store.db", run)
    monkeypatch.setenv("STEPLAB_STORE", str(tmp_path / "store.db"))
    monkeypatch.chdir(tmp_path)
    for library in re.findall(r"from steplab\.integrations\.(transformers|lightning)", block.text):
        pytest.importorskip(library, reason=f"{library} is missing: pip install {library}")
    exec(compile(block.text, "docs", "exec"), {})
