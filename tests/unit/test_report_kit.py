import csv
import dataclasses
import io
import json
import re

import pytest

from steplab.errors import UserError
from steplab.printing import plain
from steplab.report.kit.charts import drawing
from steplab.report.kit.document import (
    RESULT,
    Bar,
    Bars,
    Chart,
    Column,
    Document,
    Pairs,
    Row,
    Section,
    Segment,
    Sentences,
    Table,
    Verdict,
)
from steplab.report.kit.html import to_html
from steplab.report.kit.kernel_names import last_part, short_kernel, short_kernels
from steplab.report.kit.markup import one_document
from steplab.report.kit.pictures import Beside
from steplab.report.kit.quantities import BYTES, LABEL, SHARE, TIME
from steplab.report.kit.rendering import FORMATS, render
from steplab.report.kit.table import drawn, sheet
from steplab.report.kit.text import ABSENT, columns, flowed

ROWS: tuple[Row, ...] = (
    {"name": "a_b", "ranks": 2, "time_s": 0.0123, "size_bytes": 3 * 1024**2, "share": 0.5, "status": "ok", "extra": 1},
    {"name": "c<d>", "ranks": 2, "time_s": None, "size_bytes": None, "share": None, "status": "timeout",
     "failure": "nothing for 5min"},
)  # fmt: skip
TABLE = Table(
    name="cells",
    columns=(
        Column(key="name", header="name"),
        Column(key="ranks", header="ranks", quantity=LABEL, shared="{} rank{s}"),
        Column(key="time_s", header="median time", quantity=TIME),
        Column(key="size_bytes", header="size", quantity=BYTES, rank=1),
        Column(key="share", header="share", quantity=SHARE, rank=2),
        Column(key="absent", header="absent"),
        RESULT,
    ),
    rows=ROWS,
    caption="Medians.",
)
with drawing(100, 100, "a picture") as _nothing:
    CHART = Chart(pictures=(_nothing.picture(),), note="How to read it.")


def section_html(section: Section) -> str:
    return to_html(Document(title="t", sections=(section,)))


def document(*blocks: object, **fields: object) -> Document:
    section = Section(title="Cells", blocks=blocks or (TABLE,))  # type: ignore[arg-type]
    return dataclasses.replace(Document(title="Title", subtitle="made", sections=(section,), data=TABLE.rows), **fields)  # type: ignore[arg-type]


def test_a_terminal_has_texts_of_raw_values_and_says_once_what_rows_share() -> None:
    assert render(document(verdict=Verdict(sentences=("It is 5 ms.",))), width=80) == (
        "Title\n"
        "made\n"
        "\n"
        "It is 5 ms.\n"
        "\n"
        "Cells\n"
        "  name  median time      size   share  result\n"
        f"  {'─' * len('name  median time      size   share  timeout: nothing for 5min')}\n"
        "  a_b       12.3 ms  3.00 MiB  50.0 %  ok\n"
        "  c<d>            –         –       –  timeout: nothing for 5min\n"
        "  2 ranks. Medians."
    )


@pytest.mark.parametrize("width", range(12, 90, 3))
def test_no_line_is_wider_than_the_terminal_and_no_row_is_lost(width: int) -> None:
    text = render(document(), width=width)
    assert max(map(columns, text.splitlines())) <= max(width, 24)
    assert re.search(r"12\.3 ms", text)
    assert "c<d>" in text


def test_columns_of_the_highest_rank_give_way_first() -> None:
    text = " ".join(render(document(), width=44).split())
    assert "share" not in text.partition("─")[0]
    assert "Not shown at this width: share" in text
    assert "12.3 ms" in text


def test_the_note_of_a_column_goes_with_it() -> None:
    noted = tuple(dataclasses.replace(column, note=f"{column.heading}: explained.") for column in TABLE.columns)
    section = Section.of("Cells", dataclasses.replace(TABLE, columns=noted))
    for width, shown in ((100, True), (44, False)):
        text = " ".join(render(Document(title="t", sections=(section,)), width=width).split())
        assert ("share: explained." in text) is shown
        assert "median time: explained." in text


def test_a_column_without_a_heading_of_its_own_is_named_after_the_one_before() -> None:
    headed = tuple(dataclasses.replace(c, header="size") if c.key == "share" else c for c in TABLE.columns)
    shown = drawn(sheet(dataclasses.replace(TABLE, columns=(*headed[:3], *headed[4:], headed[3]))), 44)
    assert [column.key for column in shown.left_out] == ["share"]
    assert shown.left_out_names == ("median time size",)


def test_room_that_is_left_goes_first_to_the_columns_that_lack_least() -> None:
    long = Column(key="long", header="long", wraps_from=4)
    table = Table(name="t", columns=(Column(key="a", header="b c"), long), rows=({"a": "word", "long": "one two six"},))

    def lines(width: int) -> tuple[str, ...]:
        return drawn(sheet(table), width).rows[0]

    assert lines(100) == ("word  one two six",)
    assert lines(13) == ("word  one two", "      six")
    assert lines(10) == ("word  one", "      two", "      six")
    assert drawn(sheet(table), 9).header == (), "one field to a line"


def test_a_terminal_shows_the_first_rows_and_markdown_all_of_them() -> None:
    many = dataclasses.replace(TABLE, rows=tuple({"name": f"row{index}"} for index in range(7)), first=3)
    text = render(document(many), width=80)
    assert "row2" in text
    assert "row3" not in text
    assert "4 more rows; --format md has all." in text
    assert "row6" in render(document(many), "md")


def test_programs_get_raw_values_with_every_field() -> None:
    assert json.loads(render(document(), "json")) == [dict(row) for row in ROWS]
    first = next(csv.DictReader(io.StringIO(render(document(), "csv"))))
    assert (first["time_s"], first["extra"], first["failure"]) == ("0.0123", "1", "")
    several = document(data={"cells": ROWS, "more": ()})
    assert json.loads(render(several, "json")) == {"cells": [dict(row) for row in ROWS], "more": []}
    assert render(several, "csv") == render(document(), "csv")


@pytest.mark.parametrize(
    "name", ["=1+1", "+1", "-2+3", "@SUM(A1)", "\t=1", "\n=1", "＝1", "\x1b[0m=1", "'=1", "'quoted"]
)
def test_no_text_of_csv_is_a_formula_to_a_spreadsheet_and_each_can_be_had_back(name: str) -> None:
    rows = ({"name": name, "time_s": -0.5, name: 1},)
    [row] = csv.DictReader(io.StringIO(render(document(data=rows), "csv")))
    assert row["name"][0] == "'"
    assert row["name"].removeprefix("'") == plain(name)
    assert row["time_s"] == "-0.5", "a number is no formula"
    assert row[row["name"]] == "1", "the name of a column is written as any text"
    assert json.loads(render(document(data=rows), "json"))[0]["name"] == name


def test_nothing_of_a_record_is_taken_for_syntax() -> None:
    evil = "\x1b[31m<script>|`_$\\end{x}` & 100%"
    made = document(Sentences(texts=(evil,)), Sentences(texts=(evil,), role="code"), Pairs(pairs=(("name", evil),)))
    for syntax in ("table", "md", "latex"):
        assert "\x1b" not in render(made, syntax)
    assert r"&lt;script&gt;\|\`\_$\\end{x}\`" in render(made, "md")
    assert r"\textless{}script\textgreater{}\textbar{}`\_\$\textbackslash{}end\{x\}` \& 100\%" in render(made, "latex")
    page = section_html(made.sections[0])
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 3


def test_pictures_are_for_the_page() -> None:
    made = document(CHART)
    assert "<svg" in section_html(made.sections[0])
    for syntax in ("table", "md", "latex"):
        assert "Cells" not in render(made, syntax)


def test_figures_and_names_in_a_chart_keep_all_their_digits() -> None:
    """Coordinates are cut to hundredths: a tick of 0.015 % was once labelled 0.01 %."""
    with drawing(300, 200, "shares") as made:
        axes = made.axes(40, 20, 5, 5)
        (mark,) = axes.plot([0.123456], [0.00015], "o")
        axes.text(0.1, 0.0001, "model-1.2345 #010203 of 0.015 %")
        made.tip(mark, "0.0154 %")
    svg = made.to_svg()
    assert "model-1.2345 #010203 of 0.015 %" in svg
    assert "<title>0.0154 %</title>" in svg
    assert not re.search(r"\d\.\d{3}", re.sub(">[^<]*<", "><", svg))


def test_a_page_starts_with_long_tables_closed_and_marks_failures() -> None:
    page = section_html(document().sections[0])
    assert page.count('<tr class="bad">') == 1
    assert "<details>" not in page
    rows = tuple({"name": f"row{index}"} for index in range(30))
    assert "<summary>30 rows</summary>" in section_html(document(dataclasses.replace(TABLE, rows=rows)).sections[0])
    some = section_html(document(dataclasses.replace(TABLE, rows=rows, first=8)).sections[0])
    assert some.index("row7") < some.index("<summary>22 more rows</summary>") < some.index("row8")


def test_a_section_in_a_section_is_one_level_down() -> None:
    inner = Section(title="Inner", blocks=(Sentences(texts=("Said.",)),))
    made = document(inner)
    assert render(made, width=80).endswith("Cells\n\n  Inner\n    Said.")
    assert "## Cells\n\n### Inner\n\nSaid." in render(made, "md")
    assert re.search(r"<h2>Cells</h2>.*<h3>Inner</h3>", section_html(made.sections[0]), flags=re.DOTALL)


def test_lines_do_not_break_between_a_figure_and_its_unit() -> None:
    assert flowed("it takes 12.3 ms of the 40 ms", 16) == ["it takes 12.3 ms", "of the 40 ms"]
    assert flowed("12.3 ms 59.0 %", 10) == ["12.3 ms", "59.0 %"]
    assert flowed("12.3 ms 59.0 %", 14) == ["12.3 ms 59.0 %"]
    assert flowed(ABSENT, 4) == [ABSENT]
    assert flowed("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert flowed("漢字a漢", 4) == ["漢字", "a漢"]
    assert flowed("漢字", 1) == ["漢", "字"]
    assert flowed("a\u0301" * 5, 4) == ["a\u0301" * 4, "a\u0301"]  # an accent takes no column
    assert set(map(columns, flowed("漢" * 100_000, 80))) == {80}  # each character is looked at once


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UserError, match="there is no format 'xml'; choose one of table, json, csv, md, latex"):
        render(document(), "xml")
    assert FORMATS == ("table", "json", "csv", "md", "latex")


def test_a_page_sets_what_stands_between_backticks_as_code() -> None:
    page = render(document(Sentences(texts=("Type `steplab run --name <b>`, or ` alone.",))), "html")
    assert '<p>Type <code>steplab run <span class="nb">--name</span> &lt;b&gt;</code>, or ` alone.</p>' in page


def test_the_caption_explains_the_columns_that_a_table_has_and_no_other() -> None:
    noted = tuple(
        dataclasses.replace(column, note=f"{column.heading.capitalize()} is explained.")
        for column in TABLE.columns
        if column.key in ("time_s", "absent")
    )
    rows = tuple(dict(row) for row in ROWS)
    table = dataclasses.replace(TABLE, columns=noted, rows=rows)
    assert sheet(table).below == "Medians. Median time is explained."


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "aten::mm"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>(cutlass_80::Params)",
         "cutlass_80_simt_sgemm_128x64_8x5_tn_align1"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false>(float*, float const*, int)",
         "softmax_warp_forward<float,float,float,10,false>"),
        ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::(anonymous namespace)::"
         "masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() const::"
         "{lambda(float, bool)#1}> >(int, at::native::X)", "elementwise_kernel<gpu_kernel_impl<masked_fill_kernel>>"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "TensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
         "(at::native::ADAM_MODE)1, false>, float const*, double>(int)",
         "multi_tensor_apply_kernel<Ten…Metadata,FusedAdamMathFunctor>"),
        ("std::enable_if<!(false), void>::type gemvx::kernel<int, float>(int)", "kernel<int,float>"),
        ("", ""),
        ("()", "()"),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_kernel(name) == short
    assert len(short_kernel(name, 20)) <= 20


SGEMM = "cutlass_80_simt_sgemm_of_{}_with_a_long_name_that_all_of_them_share_to_its_very_end"


@pytest.mark.parametrize(
    "names",
    [
        [SGEMM.format(tile) for tile in ("128x64", "64x128", "256x128_split_k")],
        [f"void fill<{kind}, std::array<char*, 1ul>, a_long_argument_of_the_template_{kind}>()" for kind in "ab"],
        ["void at::kernel<int>(int)", "void at::native::kernel<int>(int)", "void at::kernel<int>(float)"],
        ["k" * 5000 + "a", "k" * 5000 + "b"],  # not even their beginnings differ
        ["x…y", "x", ""],
    ],
)
@pytest.mark.parametrize("most", [16, 44, 60])
def test_different_kernels_have_different_short_names(names: list[str], most: int) -> None:
    short = short_kernels(names, most)
    assert list(short) == names
    assert len(set(short.values())) == len(names)
    assert max(map(len, short.values())) <= most
    assert short_kernels([names[0]], most) == {names[0]: short_kernel(names[0], most)}


def test_a_gigantic_name_is_cut_quickly() -> None:
    assert len(short_kernel("k<" + "(" * 500_000 + ")" * 500_000, 60)) <= 60


@pytest.mark.parametrize(
    ("range", "part"), [("blocks.*.attention.scores", "scores"), ("blocks.*", "blocks"), ("loss", "loss"), ("", "")]
)
def test_last_part_of_a_range(range: str, part: str) -> None:
    assert last_part(range) == part


def test_a_negative_bar_goes_to_the_left_of_zero_on_a_page_and_in_a_picture() -> None:
    def bar(value: float) -> Bar:
        return Bar(label=f"{value:g}", figure="", segments=(Segment(value=value, color=1, tip=""),))

    bars = Bars(bars=(bar(3.0), bar(-1.0)))
    page = to_html(Document(title="t", sections=(Section.of("s", bars, anchor="s"),)))
    assert re.findall(r'<i style="margin-left:([\d.]+)%;width:([\d.]+)%', page) == [
        ("25.00", "75.00"),
        ("0.00", "25.00"),
    ]
    assert page.count('class="zero" style="left:25.00%"') == 2
    beside = Beside("t_md")
    render(Document(title="t", sections=(Section.of("s", bars),)), "md", beside=beside)
    (picture,) = beside.files.values()
    drawn = re.findall(r'd="M ([^"]*)z\s*"[^>]*fill: #0072b2', picture.decode())
    ahead, back = ([float(corner.split()[0]) for corner in path.replace("M", "").split("L")] for path in drawn)
    assert min(ahead) == max(back)  # zero
    assert max(ahead) - min(ahead) == pytest.approx(3 * (max(back) - min(back)), rel=1e-3)


def test_documents_in_latex_are_one_where_they_are_printed_together() -> None:
    parts = [render(Document(title=name, sections=(Section.of(name, "text"),)), "latex") for name in "ab"]
    whole = one_document(parts)
    assert (whole.count(r"\documentclass"), whole.count(r"\begin{document}"), whole.count(r"\end{document}")) == (
        1,
        1,
        1,
    )
    assert whole.index(r"\section*{a}") < whole.index(r"\section*{b}")
