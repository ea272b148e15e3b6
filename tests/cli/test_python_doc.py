import contextlib
import re
import shlex
import shutil
import subprocess

import pytest
from tests.cli.program import REPOSITORY, Program, finish
from tests.cli.test_readme import Piece, blocks, commands

TEXT = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
FOUND = list(blocks(TEXT))
OPTIONAL = ("pandas", "polars", "IPython")


def installed(piece: Piece) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        for name in OPTIONAL:
            if re.search(rf"^import {name}\b", piece.text, re.MULTILINE):
                __import__(name)
        return True
    return False


def test_every_command_works(filled: Program) -> None:
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    pieces = [line for block in FOUND if block.language == "sh" for line in commands(block)]
    assert len(pieces) >= 3
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
    pieces = [block for block in FOUND if block.language == "python" and installed(block)]
    assert len(pieces) >= 2
    lines: list[str] = []
    for piece in pieces:
        lines += [""] * (piece.line - 1 - len(lines)) + piece.text.splitlines()
    result = finish(filled.start("-c", "\n".join(lines), module="python"))
    assert result.code == 0, f"docs/python.md:\n{result.stderr}"
    assert "<Run " in result.stdout
