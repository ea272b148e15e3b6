import ast
import csv
import dataclasses
import html
import io
import json
import re
from pathlib import Path

import pytest
from tests.advice_records import some_advice
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.rendering import render_page
from tests.runs import ENVIRONMENT, make_run

import steplab
from steplab.records.ceilings import Ceiling, Ceilings
from steplab.records.codec import encode
from steplab.records.numerics import Accumulation, Binade, Numerics
from steplab.records.record import Record
from steplab.records.registry import KINDS
from steplab.report.ceilings import ceilings_verdict
from steplab.report.kit.html import to_html as document_page
from steplab.report.kit.rendering import FORMATS, render
from steplab.report.report import MODULES, Context, report_of

REPORT = Path(steplab.__file__).parent / "report"
FILES = sorted(REPORT.rglob("*.py"))
SUMS = Accumulation(
    number=0.01, accumulator="float16", addend="float16", cast=False, addend_value=0.01, num_additions=1000,
    num_rounded=900, result=9.95, binades=(Binade(start=0.0, spacing=0.0, num_additions=1000, added=0.01),),
)  # fmt: skip
EXAMPLES: dict[str, Record] = {
    "run": make_run(),
    "advice": some_advice(),
    "numerics": Numerics(
        id="5a5a5a5a5a5a", created_utc="2026-11-21T12:00:00Z", steplab_version="0.1.0", accumulations=(SUMS,)
    ),
    "attention": make_benchmark(),
    "comm": make_comm({"size": ["1MB", "10MB"], "world_size": [2]}, ranks=2),
    "ddp": make_ddp_run(("flat",)),
    "ceilings": Ceilings(
        id="ce111ce111ce", created_utc="2026-11-21T12:00:00Z", steplab_version="0.1.0", environment=ENVIRONMENT,
        ceilings=(Ceiling(name="copy", dtype=None, unit="B/s", work=8e9, seconds=(2e-3, 2.1e-3)),),
    ),
}  # fmt: skip
CHAPTERS = {
    "run": "time",
    "advice": "advice",
    "numerics": "precision",
    "attention": "attention",
    "comm": "communication",
    "ddp": "ddp",
    "ceilings": "ceilings",
}


def test_every_registered_kind_has_sections_and_an_example_here() -> None:
    assert set(MODULES) == set(KINDS) == set(EXAMPLES)


@pytest.mark.parametrize("format", [*FORMATS, "html"])
@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_record_of_every_kind_is_shown_in_every_format(kind: str, format: str) -> None:
    document, *others = report_of(kind).documents([EXAMPLES[kind]])
    text = document_page(document) if format == "html" else render(document, format, width=100)
    if format in ("json", "csv"):
        assert json.loads(text) if format == "json" else list(csv.DictReader(io.StringIO(text)))
    else:
        assert ("9.95" if kind == "numerics" else EXAMPLES[kind].id) in text  # sums are of no one record
        assert "None" not in text.split()
    assert format == "html" or all(render(other, format, width=100) for other in others)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_page_has_a_chapter_of_every_kind(kind: str) -> None:
    page = render_page([EXAMPLES[kind]], title="Page")
    assert f'id="{CHAPTERS[kind]}"' in page
    assert 'id="left-out"' not in page


def test_a_page_of_all_kinds_has_the_chapters_of_all() -> None:
    everything = render_page(list(EXAMPLES.values()), title="Page")
    assert all(f'<a href="#{anchor}">' in everything for anchor in CHAPTERS.values())


def test_a_document_says_the_same_each_time() -> None:
    for kind, record in EXAMPLES.items():
        before = encode(record)
        texts = {render(report_of(kind).documents([record])[0], "md") for _ in range(2)}
        assert len(texts) == 1
        assert encode(record) == before


# --- arrows inside the report -----------------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[2] for name in names if name.startswith("steplab.report.")}
    return found


def part_of(path: Path) -> str:
    return path.relative_to(REPORT).parts[0].removesuffix(".py")


ARROWS = {
    "kit": set(),
    "attempts": {"kit"},
    "environments": {"kit"},
    "run": {"kit", "environments"},
    "turns": {"kit"},
    "report": {"kit", "environments", "run"},
    "advice": {"kit", "report", "turns"},
    "profile": {"kit", "run"},
    "memory": {"kit", "run"},
    "precision": {"kit", "report", "run"},
    "plan": {"kit", "run", "memory"},
    "attention": {"kit", "report"},
    "comm": {"kit", "report"},
    "ddp": {"kit", "report", "run"},
    "ceilings": {"kit", "report"},
    "compare": {"kit", "memory", "run", "turns"},
    "history": {"kit", "run"},
    "runs": {"kit", "environments", "report", "run", "profile", "memory", "plan"},
    "questions": {"kit", "report", "run", "page"},
    "page": {"report", "run", "attempts", "environments", "kit"},
    "__init__": set(),
}


def test_sections_know_the_kit_and_what_is_below_them() -> None:
    wrong = {path: imported(path) - ARROWS[part_of(path)] - {part_of(path)} for path in FILES}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_no_section_knows_a_renderer() -> None:
    sections = {path: path.read_text(encoding="utf-8") for path in FILES if part_of(path) not in ("kit", "page")}
    for renderer in ("kit.terminal", "kit.html", "kit.markup", "kit.data", "kit.rendering", "rich", "jinja2"):
        named = (f"import {renderer}", f"steplab.report.{renderer}")
        assert [path for path, text in sections.items() if any(name in text for name in named)] == []


def test_a_page_shows_six_records_of_a_chapter_in_full_and_names_the_others() -> None:
    audit = make_benchmark()
    many = [dataclasses.replace(audit, id=f"{number:012x}") for number in range(13)]
    page = render_page(many, title="Many").replace("\u00a0", " ")
    assert page.count("benchmark 0000000000") == 6
    assert "7 more are not shown in full; <code>steplab show ID</code> shows each: " in page
    assert len(page.encode()) < 6.5 * len(render_page([audit], title="One").encode())


def test_ceilings_measured_on_a_busy_machine_say_that_they_may_be_too_low() -> None:
    quiet = EXAMPLES["ceilings"]
    assert isinstance(quiet, Ceilings)
    busy = dataclasses.replace(quiet, environment=dataclasses.replace(ENVIRONMENT, num_cpus=2, other_cpus=1.9))
    assert ceilings_verdict(quiet).cautions == ()
    (caution,) = ceilings_verdict(busy).cautions
    assert caution.startswith("Warning: Other processes kept 1.9 of 2 processors busy")
    assert "run `steplab doctor` on an idle machine" in caution


@pytest.mark.parametrize(
    ("triton", "kernels", "said"),
    [
        ("3.9.0", "hopper", "runs its Hopper kernels, with Triton 3.9.0."),
        ("3.5.1", "portable", "Triton 3.5.1 is too old for the Hopper ones; install torch 2.10 or newer, which"),
        (
            "3.11.0",
            "portable",
            "does not compile the Hopper ones correctly; install a torch that brings Triton 3.6 to 3.9",
        ),
        (None, None, "cannot run: Triton is not installed."),
    ],
)
def test_doctor_says_which_kernels_flash_triton_has(triton: str | None, kernels: str | None, said: str) -> None:
    hopper = dataclasses.replace(ENVIRONMENT.device, kind="cuda", compute_capability="9.0")
    environment = dataclasses.replace(ENVIRONMENT, device=hopper, triton=triton, flash_triton=kernels)
    ceilings = EXAMPLES["ceilings"]
    assert isinstance(ceilings, Ceilings)
    last = ceilings_verdict(dataclasses.replace(ceilings, environment=environment)).sentences[-1]
    assert last.startswith("Attention flash_triton ")
    assert said in last


@pytest.mark.parametrize("kind", ["comm", "ddp", "attention", "numerics", "ceilings", "advice"])
def test_the_answer_of_a_record_stands_once_on_a_page_of_it_and_whole_beside_others(kind: str) -> None:
    record = EXAMPLES[kind]
    told = report_of(kind).verdict([record], Context())
    lines = (*told.sentences, *told.cautions)

    def counts(*records: Record) -> list[int]:
        page = re.sub(r"</?(code|span)[^>]*>", "", render_page(records, title="t"))
        return [html.unescape(page).replace("\u00a0", " ").count(line.replace("`", "")) for line in lines]

    assert all(count == 1 for count in counts(record))
    assert all(count >= 1 for count in counts(record, EXAMPLES["run"]))
