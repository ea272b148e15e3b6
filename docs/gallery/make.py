"""Makes the pages of the gallery from the records of H200s that the repository has.

    python docs/gallery/make.py [PAGE ...]

Each page is what `steplab report ID ... --output PAGE.html` makes of the records in `PAGES`. The largest, `full`, is
committed, and so is docs/questions.md, the answers of `questions` with some rows of their tables; `make docs` makes all
of them.
"""

import gzip
import json
import lzma
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from steplab.cli.app import main
from steplab.records.codec import decode
from steplab.records.record import Record
from steplab.report.kit.document import Document, Section, Table
from steplab.report.kit.rendering import render
from steplab.report.questions.answers import questions_document
from steplab.specs.question import load_questions
from steplab.views.reporting import derived

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
GOLDEN, RESULTS = REPOSITORY / "tests" / "golden", REPOSITORY / "benchmarks" / "results"
STEPS = GOLDEN / "step_h200_202611.jsonl.gz"
PROFILES = GOLDEN / "profile_h200_202611.jsonl.gz"
MEMORY = GOLDEN / "memory_h200_202611.jsonl.xz"
PRECISION = GOLDEN / "precision_h200_202611.jsonl.xz"
ATTENTION = RESULTS / "attention_h200_202611.jsonl.gz"
COLLECTIVES = RESULTS / "comm_h200_202611.jsonl.gz"
DATA_PARALLEL = RESULTS / "ddp_h200_202611.jsonl.gz"
DATA_PARALLEL_CHECKED = RESULTS / "ddp_checked_h200_202611.jsonl.gz"
LAYOUTS = RESULTS / "layout_h200_202611.jsonl.gz"
GLOO = RESULTS / "comm_cpu_202611.jsonl.gz"
FLASH_IN_PYTORCH = RESULTS / "attention_reference_h200_202611.jsonl.gz"
GLOO_TO_1_GB = RESULTS / "comm_gloo_h200_202611.jsonl.gz"
ON_CPU = RESULTS / "cpu_202611.jsonl.gz"
_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}

Head = Mapping[str, Any]
"""A record as JSON."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of the gallery."""

    title: str
    """Its heading."""
    files: Mapping[Path, Callable[[Head], bool]]
    """Where its records are, and which of a file's they are."""
    questions: str = ""
    """The questions that it answers; empty: it has the chapters of its records."""

    def lines(self) -> list[str]:
        """The records, one JSON document each, in the order they were measured."""
        found: list[tuple[str, str]] = []
        for path, belongs in self.files.items():
            with _OPEN[path.suffix](path, "rt", encoding="utf-8") as file:
                found += [(head["created_utc"], line) for line in file if belongs(head := json.loads(line))]
        return [line for _, line in sorted(found)]

    def records(self) -> list[Record]:
        """The records, decoded."""
        return [decode(line) for line in self.lines()]


def _every(head: Head) -> bool:
    return True


def _named(*names: str) -> Callable[[Head], bool]:
    return lambda head: head["name"] in names


def _ids(*ids: str) -> Callable[[Head], bool]:
    return lambda head: head["id"] in ids


def _profiled(head: Head) -> bool:
    """The profiles of bf16 steps of the built-in sizes."""
    return head["name"] == "profiles" and head["spec"]["precision"] == "bf16"


def _attention(head: Head) -> bool:
    """The newest comparison with peers, the study, and the long sequences of two head dimensions."""
    return head["id"] in ("f35c5aced2c3", "9c03359db301", "cbb0072f24b7", "5f69823e9286", "ae34ac94a844") or (
        head["name"].startswith("study-")
    )


def _no_widths(head: Head) -> bool:
    """All but the studies of head dimensions, which have a shape of the comparison with peers again, without peers."""
    return head["name"] != "dims"


def _on_four(head: Head) -> bool:
    """The layouts of four GPUs."""
    return prod(head["spec"]["layout"].values()) == 4


PAGES = {
    "full": Page(
        title="A full study on H200s",
        files={
            STEPS: _named("sizes", "compiled", "warmup"),
            PROFILES: _profiled,
            MEMORY: _every,
            PRECISION: _every,
            ATTENTION: _attention,
            COLLECTIVES: _named("comm 4 GPUs", "comm 2 GPUs"),
            DATA_PARALLEL: _ids("1c486669f006", "4325a1ec5501", "9a19004587b5"),
            LAYOUTS: _on_four,
        },
    ),
    "questions": Page(
        title="The training step, question by question",
        files=dict.fromkeys(
            (
                STEPS,
                PROFILES,
                MEMORY,
                PRECISION,
                COLLECTIVES,
                GLOO,
                GLOO_TO_1_GB,
                DATA_PARALLEL_CHECKED,
                ON_CPU,
                FLASH_IN_PYTORCH,
            ),
            _every,
        )
        | {ATTENTION: _no_widths},
        questions="assignment",
    ),
    "run": Page(title="One profiled step", files={PROFILES: _ids("62cf52f9b110")}),
    "sizes": Page(title="Step time by size", files={STEPS: _named("sizes")}),
    "memory": Page(title="Memory of a step", files={MEMORY: _ids("aa06916a8789")}),
    "attention": Page(title="Attention against its peers", files={ATTENTION: _ids("f35c5aced2c3")}),
    "comm": Page(title="Collectives on four GPUs", files={COLLECTIVES: _named("comm 4 GPUs")}),
    "ddp": Page(title="Data parallelism on two GPUs", files={DATA_PARALLEL: _named("compiled-2")}),
}
"""Page by file name."""


def make(name: str, folder: Path = HERE) -> Path:
    """Write a page, and return where it is. Raises SystemExit where that fails."""
    return _made(PAGES[name], folder / f"{name}.html")


_PICTURES = (
    "Pictures: memory over [forward alone](memory_forward.svg) and [a step](memory_bf16.png), "
    "[data-parallel steps](ddp_timelines.png) under the profiler, [collectives](comm_time.png). "
    "`python docs/gallery/make.py questions` makes the page with all of them."
)
_SHOWN: dict[str, dict[str, list[Any]]] = {
    "How long do forward and backward": {"context": [512]},
    "What changes without": {},
    "What does bf16 save": {"context": [128, 512]},
    "How does the peak grow": {},
    "How long does plain attention": {"queries": [256, 2048, 16384]},
    "And over widths": {"queries": [128, 1024, 16384]},
    "How long does an all-reduce": {},
    "Buckets of 1": {},
}
"""The questions, by their first words, whose tables are in docs/questions.md -> the rows that it shows."""


def answers(records: Sequence[Record], store: Path) -> str:
    """The answers to all questions and some rows of their tables, in Markdown; the records are in the store too."""
    asked = load_questions("assignment")
    made = questions_document(asked, records, partial(derived, store), PAGES["questions"].title)
    figures = []
    for section in (block for chapter in made.sections[1:] for block in chapter.blocks if isinstance(block, Section)):
        for begins in _SHOWN:
            if section.title.startswith(begins):
                figures += [Section.of(section.title, _few(each, _SHOWN[begins])) for each in section.blocks]
    sections = (made.sections[0], Section.of("Figures", *figures))
    text = render(Document(title=made.title, subtitle=made.subtitle, verdict=made.verdict, sections=sections), "md")
    lines = (re.sub(r" ?\| ?", "|", line) if line.startswith("|") else line for line in text.splitlines())
    return "\n".join([*lines, "", _PICTURES, ""])


def _few(block: object, shown: Mapping[str, list[Any]]) -> Table | None:
    """A table's rows with these values."""
    if not isinstance(block, Table):
        return None
    rows = (row for row in block.rows if all(row[key] in values for key, values in shown.items()))
    common, *told = block.caption.split(". ")
    return replace(
        block, rows=tuple(rows), caption=". ".join([common, *(s for s in told if s.startswith(("Doubtful", "Failed")))])
    )


def _made(page: Page, target: Path) -> Path:
    with tempfile.TemporaryDirectory() as work:
        lines, store = page.lines(), f"{work}/store.db"
        (Path(work) / "records.jsonl").write_text("".join(lines), encoding="utf-8")
        ids = [json.loads(line)["id"] for line in lines]
        asked = ["--questions", page.questions] if page.questions else []
        for words in (
            ["import", f"{work}/records.jsonl", "--store", store],
            ["report", *ids, "--title", page.title, "--store", store, "--output", str(target), *asked],
        ):
            if code := main(words):
                raise SystemExit(code)
        if page.questions:
            text = answers(page.records(), Path(store))
            (HERE.parent / "questions.md").write_text(text, encoding="utf-8")
    return target


if __name__ == "__main__":
    for named in sys.argv[1:] or PAGES:
        make(named)
