import re
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import matplotlib
import pytest
from tests.attention_records import make_benchmark
from tests.ddp_records import make_ddp_run
from tests.profiles import profiled_run

from steplab.cli.app import main
from steplab.lab.keeping import open_store
from steplab.records.record import Record
from steplab.report.kit.document import Bar, Bars, Column, Document, Section, Segment, Table
from steplab.report.kit.pictures import Beside
from steplab.report.kit.rendering import render

NAME = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def store(tmp_path: Path) -> str:
    records: list[Record] = [profiled_run(), make_ddp_run(), make_benchmark()]
    with open_store(tmp_path / "store.db", write=True) as opened:
        for record in records:
            opened.add(record)
    return str(tmp_path / "store.db")


def ids(store: str) -> list[str]:
    with open_store(Path(store), write=False) as opened:
        return [str(row["id"]) for kind in ("run", "ddp", "attention") for row in opened.rows(kind=kind)]


def test_a_folder_gets_a_text_whose_pictures_exist_and_stand_alone(store: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for chosen, name, shown in (("md", "report.md", ids(store)), ("latex", "report.tex", ids(store)[-1:])):
        words = ["--title", "Three", "--format", chosen, "--store", store, "--output", f"{folder}/"]
        assert main(["report", *shown, *words]) == 0
        assert "Three" in (folder / name).read_text()
    text = (folder / "report.md").read_text()
    named = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(named) > 5
    assert {path.name for path in (folder / "report_md").glob("*.svg")} == {Path(name).name for name in named}
    for name in named:
        picture = (folder / name).read_text()
        assert "var(" not in picture
        assert ElementTree.fromstring(picture).attrib.keys() >= {"width", "height"}
    drawn = re.findall(r"\\drawn\{\w+\}\{([^}]*)\}", (folder / "report.tex").read_text())
    assert 1 < len(drawn) < len(named)
    assert all((folder / name).read_bytes().startswith(b"%PDF") for name in drawn)
    again = ["report", ids(store)[-1], "--format", "md", "--store", store, "--output", f"{folder}/"]
    assert main(again) == 0  # an earlier one is replaced


def test_bars_are_as_long_as_their_values_with_their_legend() -> None:
    bars = Bars(
        bars=tuple(
            Bar(label=f"bar {value}", figure=str(value), segments=(Segment(value=value, color=1, tip=""),))
            for value in (1.0, 2.0, 4.0)
        ),
        legend=((1, "■", "seconds"),),
    )
    beside = Beside("x")
    render(Document(title="t", sections=(Section.of("Time", bars),)), "md", beside=beside)
    ((name, content),) = beside.files.items()
    assert name == "x/01-time.svg"
    root = ElementTree.fromstring(content)
    ends = [
        [float(corner.split()[0]) for corner in re.split("[ML]", path.attrib["d"].strip(" z\n")) if corner.strip()]
        for path in root.iter(f"{NAME}path")
        if "#0072b2" in path.attrib.get("style", "") and "clip-path" in path.attrib
    ]
    lengths = [max(x) - min(x) for x in ends]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1, 2, 4], rel=1e-3)
    assert {"seconds", "bar 2.0", "4.0"} <= {"".join(text.itertext()) for text in root.iter(f"{NAME}text")}


def test_a_long_table_is_a_file_beside_its_first_rows() -> None:
    table = Table(name="numbers", columns=(Column(key="n_bytes"),), rows=tuple({"n_bytes": n} for n in range(100)))
    beside = Beside("x")
    text = render(Document(title="t", sections=(Section.of("Numbers", table),)), "md", beside=beside)
    assert text.count("\n| ") == 42  # heading and rule too
    assert "All 100 rows: [x/01-numbers.csv](x/01-numbers.csv)." in text
    assert beside.files["x/01-numbers.csv"].decode().split() == ["n_bytes", *map(str, range(100))]
    assert render(Document(title="t", sections=(Section.of("Numbers", table),)), "md").count("\n| ") == 102


def test_a_pdf_has_the_pages_colours() -> None:
    bars = Bars(bars=(Bar(label="µs", figure="1", segments=(Segment(value=1.0, color=1, tip=""),)),))
    beside = Beside("x", "pdf")
    with patch.dict(matplotlib.rcParams, {"pdf.compression": 0}):
        render(Document(title="t", sections=(Section.of("Time", bars),)), "latex", beside=beside)
    (content,) = beside.files.values()
    assert content.startswith(b"%PDF")
    red, green, blue = (value / 255 for value in bytes.fromhex("0072b2"))
    assert f"{red:g} {green:.10g} {blue:.10g} rg".encode() in content
