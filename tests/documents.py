from pathlib import Path

_DOCS = Path(__file__).parents[1] / "docs"


def chapter_says(chapter: str, *told: str) -> None:
    """Fail unless a chapter of docs has these texts, with figures computed by the caller; lines may break anywhere."""
    text = " ".join((_DOCS / f"{chapter}.md").read_text(encoding="utf-8").split())
    for one in told:
        assert one in text, f"docs/{chapter}.md no longer tells what the data say: {one}"
