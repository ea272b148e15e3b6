"""Every command of the tutorials works as it is written, in its order."""

from pathlib import Path

from tests.cli.program import REPOSITORY, Program
from tests.cli.test_readme import SHELLS, blocks, commands, run_piece


def test_every_command_of_the_tutorials_works_in_its_order(steplab: Program) -> None:
    (steplab.cwd / "tests").mkdir()
    Path(steplab.cwd / "tests" / "golden").symlink_to(REPOSITORY / "tests" / "golden")
    text = (REPOSITORY / "docs" / "tutorials.md").read_text(encoding="utf-8")
    found = [piece for block in blocks(text) if block.language in SHELLS for piece in commands(block)]
    assert len(found) > 10
    for piece in found:
        run_piece(steplab, piece)
