"""Every command and every piece of Python in docs/python.md works as it is written, one after the other."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from unittest.mock import patch

import pytest
from tests.cli.program import REPOSITORY, Program
from tests.cli.test_readme import Piece, blocks, commands

TEXT = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
FOUND = list(blocks(TEXT))
OPTIONAL = ("pandas", "polars", "IPython", "submitit")
"""Libraries that steplab does not need; a piece that imports one is left out where it is not installed."""


def installed(piece: Piece) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        for name in OPTIONAL:
            if re.search(rf"^import {name}\b", piece.text, re.MULTILINE):
                __import__(name)
        return True
    return False


def test_every_command_works(filled: Program) -> None:
    """With a store of a few measurements; what is piped to jq gives something there."""
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    pieces = [line for block in FOUND if block.language == "sh" for line in commands(block)]
    assert len(pieces) >= 4
    for piece in pieces:
        ours, _, theirs = piece.text.partition(" | ")
        given = filled.here(*shlex.split(ours)[1:])
        assert given.code == 0, f"{piece}\n{given.stderr}"
        taken = subprocess.run(
            ["bash", "-c", theirs or "cat"], input=given.stdout, capture_output=True, text=True, check=False
        )
        assert taken.returncode == 0, f"{piece}\n{taken.stdout}\n{taken.stderr}"
        assert taken.stdout.strip(), piece


def test_every_piece_of_python_works(filled: Program) -> None:
    """In this process, which has torch already; all pieces share their names, as in a notebook."""
    pieces = [block for block in FOUND if block.language == "python"]
    assert len(pieces) >= 2
    names: dict[str, object] = {}
    out = io.StringIO()
    with patch.dict(os.environ, filled.environment), contextlib.chdir(filled.cwd), contextlib.redirect_stdout(out):
        for piece in filter(installed, pieces):
            try:
                exec(compile(piece.text, f"docs/python.md, line {piece.line}", "exec"), names)
            except Exception as error:
                pytest.fail(f"docs/python.md line {piece.line}: {type(error).__name__}: {error}\n{piece.text}")
    assert "<Run " in out.getvalue()
