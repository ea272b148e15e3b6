"""Made text in a page that is written by hand: it stands between two comments that name the script that makes it."""

import sys
from pathlib import Path


def marks(script: str) -> tuple[str, str]:
    """The comments before and after what a script of benchmarks/ makes."""
    return f"<!-- begin: benchmarks/{script} -->", f"<!-- end: benchmarks/{script} -->"


def write_between_marks(page: Path, script: str, text: str) -> None:
    """Put the text in place of what stands between the marks of a script; ends the program if the page has none."""
    begin_mark, end_mark = marks(script)
    content = page.read_text(encoding="utf-8")
    begin, end = content.find(begin_mark), content.find(end_mark)
    if not 0 <= begin < end:
        sys.exit(f"{page} has no {begin_mark} with {end_mark} after it")
    page.write_text(f"{content[:begin]}{begin_mark}\n\n{text}\n\n{content[end:]}", encoding="utf-8")
