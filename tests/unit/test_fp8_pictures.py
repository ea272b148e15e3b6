from pathlib import Path

from tests.unit.test_docs_site import REPOSITORY, loaded

PICTURES = loaded(REPOSITORY / "docs" / "fp8_pictures.py")
NAMES = ("fp8_loss.svg", "fp8_difference.svg", "fp8_error.svg", "fp8_flushed.svg")


def test_the_pictures_of_the_chapter_are_those_of_the_committed_records(tmp_path: Path) -> None:
    PICTURES.main(tmp_path)
    chapter = (REPOSITORY / "docs" / "fp8.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)
    for name in NAMES:
        assert (tmp_path / name).read_text() == (REPOSITORY / "docs" / name).read_text()
        assert f"]({name})" in chapter


def test_every_block_of_small_is_in_the_picture() -> None:
    found = PICTURES.of_layers(PICTURES.audited())
    counts = {name: [len(losses) for losses in of_passes.values()] for name, of_passes in found.items()}
    assert counts == {layer: [12, 12] for layer in PICTURES.LAYERS.values()}
