import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

from steplab.records.record import Record
from steplab.records.rows import Row
from steplab.records.run import Run
from steplab.report.kit.rendering import PAGE, render
from steplab.report.kit.table import Sheet, sheet
from steplab.report.page import page_document
from steplab.report.report import Context
from steplab.report.run.columns import rows_document, rows_table
from steplab.report.runs import REPORT


def rows_text(rows: Sequence[Row], format: str = "table", *, width: int | None = None, color: bool = False) -> str:
    return render(rows_document(rows), format, width=width, color=color)


def render_page(records: Sequence[Record], **more: Any) -> str:
    return render(page_document(records, **more), PAGE)


def sheet_of(rows: Sequence[Row]) -> Sheet:
    return sheet(rows_table(rows))


def run_text(
    run: Run, format: str = "table", *, references: Sequence[Run] = (), width: int | None = None, color: bool = False
) -> str:
    (document,) = REPORT.documents([run], Context(references=references))
    return render(document, format, width=width, color=color)


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def assert_whole(page: str) -> None:
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    assert not re.findall(r"(?:src|href)=\"(?!#)", page)
    assert "<script" not in page
    assert "None" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
