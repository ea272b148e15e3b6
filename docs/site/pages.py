"""Adds the repository's other documents and results to the documentation site, and moves links accordingly.

Pages link to each other as repository files do, so they read the same on a forge. On the site, README.md is the first
page; other documents and results are under `repository/`. Links to files that a browser cannot show become plain text.
mkdocs calls the functions named `on_...`.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
SHOWN = ("*.md", "*.csv", "*.json")
"""Results that a browser shows."""
LINK = re.compile(r"(?<!`)(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*([^)\s]+)\s*\)")
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def places() -> dict[str, str]:
    """Where each file is on the site, by its path in the repository."""
    docs = (path for path in (REPOSITORY / "docs").rglob("*") if path.is_file() and path.suffix != ".py")
    found = {path.relative_to(REPOSITORY).as_posix(): path.relative_to(REPOSITORY / "docs").as_posix() for path in docs}
    found |= {name: f"repository/{name}" for name in DOCUMENTS} | {"README.md": "index.md"}
    results = (path for shape in SHOWN for path in (REPOSITORY / "benchmarks" / "results").glob(shape))
    return found | {(name := path.relative_to(REPOSITORY).as_posix()): f"repository/{name}" for path in results}


def moved(markdown: str, source: str) -> str:
    """A page's text with the links that it has on the site; `source` is its path in the repository."""
    where = places()

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        place = where.get(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        if place is None:
            return text if (REPOSITORY / posixpath.dirname(source) / path).exists() else found[0]
        here = posixpath.dirname(where[source])
        return f"{image}[{text}]({posixpath.relpath(place, here or '.')}{'#' + anchor if anchor else ''})"

    pieces, end = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join((*pieces, LINK.sub(link, markdown[end:])))


def on_files(files: Any, config: Any) -> Any:
    """Add what is not in docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for name, place in places().items():
        if not name.startswith("docs/"):
            added = File.generated(config, place, abs_src_path=str(REPOSITORY / name))
            if "/results/" in place:
                added.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Give the page the links of the site."""
    source = next(name for name, place in places().items() if place == page.file.src_uri)
    return moved(markdown, source)
