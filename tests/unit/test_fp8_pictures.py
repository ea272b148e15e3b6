from pathlib import Path

import pytest
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


@pytest.mark.parametrize("layer", ["query_key_value", "down"])
def test_every_product_of_a_block_is_in_the_picture(layer: str) -> None:
    """Twelve blocks of small; in the backward pass the gradients of input and weight are one entry of the audit."""
    [found] = [each for name, each in PICTURES.of_layers(PICTURES.audited()).items() if name.endswith(layer)]
    assert {phase: len(losses) for phase, losses in found.items()} == {"forward": 12, "backward": 12}
