import html
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from tests.documents import chapter_says

from steplab.report.page import page_verdict

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"


def test_the_committed_page_answers_as_its_records_do_today() -> None:
    spec = spec_from_file_location("gallery", GALLERY / "make.py")
    assert spec
    assert spec.loader
    gallery = module_from_spec(spec)
    spec.loader.exec_module(gallery)
    records = gallery.PAGES["full"].records()
    chapter_says("gallery", f"| {len(records)} records, as", f"| {len(gallery.PAGES['sizes'].lines())} steps of")
    verdict = page_verdict(records)
    page = (GALLERY / "full.html").read_text(encoding="utf-8")
    (box,) = re.findall(r'<div class="verdict">(.*?)</div>', page, re.DOTALL)
    told = [html.unescape(text).replace("\u00a0", " ") for text in re.findall(r"<p[^>]*>(.*?)</p>", box)]
    again = "; `python docs/gallery/make.py full` makes the page again"
    assert told == [*verdict.sentences, *verdict.cautions], again
    assert len(page.encode()) <= 3_000_000
    assert "://" not in re.sub(r"<(p|li|dd|td|figcaption)\b[^>]*>.*?</\1>|xmlns=\"[^\"]*\"", "", page, flags=re.DOTALL)
