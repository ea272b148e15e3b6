from tests.cli.program import REPOSITORY, Program
from tests.cli.test_readme import SHELLS, blocks, check_without_running, commands, run_piece


def test_every_command_of_the_tutorials_works_in_its_order(reader: Program) -> None:
    text = (REPOSITORY / "docs" / "tutorials.md").read_text(encoding="utf-8")
    found = [piece for block in blocks(text) if block.language in SHELLS for piece in commands(block)]
    assert len(found) > 10
    for piece in found:
        (run_piece if piece.is_run else check_without_running)(reader, piece)
