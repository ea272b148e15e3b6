import posixpath
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


def loaded(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = loaded(REPOSITORY / "docs" / "site" / "pages.py")
PLACES: dict[str, str] = SITE.places()
PAGES = sorted(name for name, place in PLACES.items() if place.endswith(".md"))


def anchors(markdown: str) -> set[str]:
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1", "", markdown, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def test_every_chapter_is_in_the_navigation() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {place for place in PLACES.values() if place.endswith(".md") and "/results/" not in place}


@pytest.mark.parametrize("source", PAGES)
def test_every_link_leads_to_something(source: str) -> None:
    by_place = {place: name for name, place in PLACES.items()}
    for _, text, target in SITE.LINK.findall(SITE.moved((REPOSITORY / source).read_text(encoding="utf-8"), source)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        place = posixpath.normpath(posixpath.join(posixpath.dirname(PLACES[source]), path)) if path else PLACES[source]
        if place.startswith("gallery/") and place.endswith(".html"):  # `make docs` makes them
            assert Path(place).stem in loaded(REPOSITORY / "docs" / "gallery" / "make.py").PAGES
            continue
        assert place in by_place, f"{source}: [{text}]({target})"
        if anchor:
            assert anchor in anchors((REPOSITORY / by_place[place]).read_text(encoding="utf-8")), f"{source}: {target}"
