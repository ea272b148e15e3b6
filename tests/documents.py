"""What a chapter says of the repository's own data, held to that data by the tests that read it."""

from pathlib import Path

_DOCS = Path(__file__).parents[1] / "docs"


def chapter_says(chapter: str, *told: str) -> None:
    """Fail unless a chapter of docs has each of these texts, whose figures the caller has computed; lines may break
    anywhere in them."""
    text = " ".join((_DOCS / f"{chapter}.md").read_text(encoding="utf-8").split())
    for one in told:
        assert one in text, f"docs/{chapter}.md no longer tells what the data say: {one}"
