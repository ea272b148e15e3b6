from tests.cli.program import REPOSITORY, Program
from tests.cli.test_readme import SHELLS, blocks, check_without_running, commands, pieces, run_piece


def test_every_command_of_the_tutorials_works_in_its_order(reader: Program) -> None:
    text = (REPOSITORY / "docs" / "tutorials.md").read_text(encoding="utf-8")
    found = [piece for block in blocks(text) if block.language in SHELLS for piece in commands(block)]
    assert len(found) > 10
    run_elsewhere = {piece.text for piece in pieces() if piece.is_run}
    for piece in found:
        run = piece.is_run and piece.text not in run_elsewhere
        (run_piece if run else check_without_running)(reader, piece)
