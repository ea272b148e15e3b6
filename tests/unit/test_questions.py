import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tables import GOLDEN, RESULTS, read
from tests.cli.program import REPOSITORY
from tests.runs import make_run, out_of_memory
from tests.stored_lines import fill
from tests.unit.test_docs_site import loaded

from steplab import units
from steplab.cli.app import main
from steplab.errors import UserError
from steplab.records.ddp import DdpRun
from steplab.records.record import Record
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.report.kit.document import Bars, Document, Section, Sentences, Table, Verdict
from steplab.report.kit.pictures import Beside
from steplab.report.kit.rendering import render
from steplab.report.questions.answers import questions_document
from steplab.specs.question import load_questions

FACTORS = """
title = "Factors"
[[chapter]]
title = "Timing"
[[chapter.question]]
asks = "What does bf16 save?"
rows_of = "runs"
where = { precision = "bf16" }
rows = "model"
across = "context"
columns = [{ value = "step_time_s", against = { precision = "fp32" } }]
figures.best = { value = "step_time_s", against = { precision = "fp32" }, take = "min" }
figures.grows = { value = "step_time_s", take = "a_doubling", along = "context" }
answer = "At best {best} ({best.at}); a doubling takes {grows}."
measure = "steplab study sizes"
[[chapter.question]]
asks = "And fp16?"
rows_of = "runs"
where = { precision = "fp16" }
figures.step = { value = "step_time_s" }
answer = "{step}."
measure = "steplab study sizes"
"""


@pytest.fixture
def factors(tmp_path: Path) -> str:
    path = tmp_path / "factors.toml"
    path.write_text(FACTORS)
    return str(path)


def lasting(seconds: float) -> Timing:
    return Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", host_s=(seconds,) * 10),))


def of_factors() -> list[Record]:
    seconds = {(64, "fp32"): 0.4, (64, "bf16"): 0.2, (128, "fp32"): 1.6, (128, "bf16"): 0.4}
    runs: list[Record] = [
        make_run({"model": "tiny", "context": context, "precision": precision}, timing=lasting(step_s))
        for (context, precision), step_s in seconds.items()
    ]
    return [*runs, make_run({"model": "small", "context": 64, "precision": "bf16"}, timing=lasting(9.0))]


def test_a_doubtful_step_counts_only_alone_and_a_headline_stands_first(tmp_path: Path) -> None:
    path = tmp_path / "factors.toml"
    path.write_text(FACTORS + 'rows = "context"\ncolumns = [{ value = "step_time_s" }]\nheadline = true\n')
    outliers = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", host_s=(0.3,) * 6 + (0.9,) * 4),))
    asked: dict[str, object] = {"model": "tiny", "context": 64, "precision": "fp16"}
    quiet, disturbed = make_run(asked, timing=lasting(0.2)), make_run(asked, timing=outliers)
    for records, told in (([], None), ([quiet, disturbed], "200 ms."), ([disturbed], "300 ms.")):
        document = questions_document(load_questions(str(path)), records, nothing)
        data: Any = document.data
        assert data[1]["answer"] == told
        assert (document.verdict.sentences[0] == told) == (told is not None)
        assert document.verdict.sentences[-1].startswith("Answered: ")
    assert "Doubtful times: context 64 (outliers, unsteady)." in render(document, "md")


def nothing(_: object) -> Document:
    return Document(title="", verdict=Verdict(sentences=("derived",)))


def sections(document: Document) -> dict[str, Section]:
    return {
        block.title: block for chapter in document.sections for block in chapter.blocks if isinstance(block, Section)
    }


def text_of(section: Section) -> str:
    return " ".join(text for block in section.blocks if isinstance(block, Sentences) for text in block.texts)


def test_figures_are_quotients_of_rows_that_differ_in_one_setting(factors: str) -> None:
    document = questions_document(load_questions(factors), of_factors(), nothing)
    found = sections(document)
    assert "At best 0.25× (tiny, context 128); a doubling takes 2.0×." in text_of(found["What does bf16 save?"])
    (table,) = (block for block in found["What does bf16 save?"].blocks if isinstance(block, Table))
    small, tiny = sorted(table.rows, key=lambda row: str(row["model"]))
    assert [tiny["at 64"], tiny["at 128"]] == pytest.approx([0.5, 0.25])
    assert small["at 64"] is None  # it has no step in fp32


def test_an_open_question_names_the_command_that_measures_it(factors: str) -> None:
    document = questions_document(load_questions(factors), of_factors(), nothing)
    assert "run `steplab study sizes`" in text_of(sections(document)["And fp16?"])
    assert document.verdict.sentences == ("Answered: 1 of 2 questions, from 5 records.",)
    assert [row["answer"] is None for row in document.data] == [False, True]  # type: ignore[index]


def test_the_newest_of_equal_steps_answers(factors: str) -> None:
    again = make_run(
        {"model": "tiny", "context": 128, "precision": "bf16"}, timing=lasting(0.8), created_utc="2099-01-01T00:00:00Z"
    )
    found = sections(questions_document(load_questions(factors), [again, *of_factors()], nothing))
    assert "At best 0.50×" in text_of(found["What does bf16 save?"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('take = "min"', "figures"),
        ('rows_of = "run"', "choose one of runs, phases"),
        ("{best.at}", "the figures of its question are"),
        ('where = { precision = "bf16" }', "names 'presicion'; runs have .*precision"),
    ],
)
def test_what_is_no_question_is_said(factors: str, wrong: str, said: str) -> None:
    right = {
        'take = "min"': 'take = "least"',
        'rows_of = "run"': None,
        "{best.at}": "{worst}",
        'where = { precision = "bf16" }': 'where = { presicion = "bf16" }',
    }[wrong]
    text = (
        FACTORS.replace('rows_of = "runs"', 'rows_of = "run"', 1) if right is None else FACTORS.replace(wrong, right, 1)
    )
    Path(factors).write_text(text)
    with pytest.raises(UserError, match=said):
        questions_document(load_questions(factors), of_factors(), nothing)


_IN_RESULTS = (
    *("attention_h200", "attention_reference_h200", "comm_h200", "comm_cpu", "comm_gloo_h200"),
    *("ddp_checked_h200", "cpu"),
)


@pytest.fixture(scope="module")
def recorded() -> list[Record]:
    files = (
        *(GOLDEN / f"{name}_h200_202611.jsonl.{kind}" for name, kind in (("step", "gz"), ("memory", "xz"))),
        *(GOLDEN / f"{name}_h200_202611.jsonl.{kind}" for name, kind in (("profile", "gz"), ("precision", "xz"))),
        *(RESULTS / f"{name}_202611.jsonl.gz" for name in _IN_RESULTS),
    )
    return [record for file in files for record in read(file, Record)]


@pytest.fixture(scope="module")
def answered(recorded: list[Record]) -> Document:
    return questions_document(load_questions("assignment"), recorded, nothing)


def test_the_assignment_is_answered_by_recorded_runs(recorded: list[Record], answered: Document) -> None:
    data: Any = answered.data
    unknown = [row["question"] for row in data if row["answer"] is None]
    assert unknown == ["And on an Apple GPU, mps?"]
    told = {row["question"]: row["answer"] for row in data}
    assert told["How does memory saved for backward grow with the length, and what removes it?"] == (
        "A doubled length saves 4.0× as much in plain attention and 2.0× in FlashAttention."
    )
    steps = {
        (run.spec.model.name, run.spec.context): run.phase_s("backward")
        for run in recorded
        if isinstance(run, Run)
        and run.spec
        and run.spec.precision == "fp32"
        and run.spec.pass_name == "forward_backward"
    }
    assert (steps["2.7b", 1024] or 0) > (steps["small", 128] or 0)
    assert "both together at most 2.00 s (2.7b, context 1024)" in told["How long do forward and backward take?"]


def test_softmax_and_products_of_attention_are_forwards_own(recorded: list[Record], answered: Document) -> None:
    asked = sections(answered)["How do softmax and the products of attention compare, in time and in FLOPs?"]
    (table,) = (block for block in asked.blocks if isinstance(block, Table))
    (row,) = (row for row in table.rows if row["model"] == "large" and row["context"] == 1024)
    (profile,) = (run.profile for run in recorded if isinstance(run, Run) and run.id == "6741bf51e46b" and run.profile)
    for part, name in (("softmax", "softmax_warp_forward"), ("scores", "gemm"), ("values", "gemm")):
        kernels = [
            k for k in profile.kernels if k.range.endswith(f".{part}") and k.phase == "forward" and name in k.name
        ]
        assert row[f"at {part}"] == pytest.approx(sum(k.total_s for k in kernels) / profile.num_steps)


@pytest.mark.release
def test_the_page_of_answers_is_of_the_records_today(recorded: list[Record], tmp_path: Path) -> None:
    records = [record for record in recorded if record.name not in ("identical", "dims")]
    fill(tmp_path / "store.db", *records)
    page = loaded(REPOSITORY / "docs" / "gallery" / "make.py").answers(records, tmp_path / "store.db")
    committed = (REPOSITORY / "docs" / "questions.md").read_text(encoding="utf-8")
    assert page == committed, "`python docs/gallery/make.py questions` makes it again"


def test_ranks_of_gloo_and_of_nccl_are_side_by_side_and_machines_apart(answered: Document) -> None:
    asked = sections(answered)["How long does an all-reduce take, by size, backend and number of processes?"]
    (table,) = (block for block in asked.blocks if isinstance(block, Table))
    rows = {(row["machine"], row["way"], row["world_size"]): row for row in table.rows}
    assert {ranks for machine, way, ranks in rows if (machine, way) == ("AMD EPYC", "gloo")} == {2, 4, 6}
    assert {ranks for machine, way, ranks in rows if (machine, way) == ("NVIDIA H200", "nccl")} == {2, 4}


def test_what_bf16_changes_of_the_peak_is_the_records_categories(recorded: list[Record], answered: Document) -> None:
    peaks = {
        run.spec.precision: run.memory_profile.at_peak
        for run in recorded
        if isinstance(run, Run) and run.spec and run.memory_profile and run.name.startswith("2.7b-512-train-")
        if run.name in ("2.7b-512-train-fp32", "2.7b-512-train-bf16")
    }
    share = peaks["bf16"]["activations"] / peaks["fp32"]["activations"]
    found = sections(answered)["Which part of the peak does it change?"]
    assert f"Activations take {share:.2f}× of fp32's" in text_of(found)


def test_answers_are_the_samples_own(recorded: list[Record], answered: Document) -> None:
    data: Any = answered.data
    told = {row["question"]: row["answer"] for row in data}
    (run,) = (each for each in recorded if isinstance(each, DdpRun) and each.id == "f310345c7537")
    factors = {"all_reduce": 2 * 3 / 4, "reduce": 1, "broadcast": 1}  # of four ranks
    sent = {
        cell.contender.kind: sum(factors[each.collective] * each.total_bytes for each in cell.messages)
        for cell in run.cells
        if cell.contender.kind in ("torch_ddp", "sharded") and cell.contender.transport != "peer_copy"
    }
    zero = told["How does it differ from ZeRO stage 1, in memory and in volume?"]
    assert f"Ours puts {units.format_bytes(sent['sharded'])} on the wire by NCCL; " in zero
    assert f"as much as an all-reduce, {units.format_bytes(sent['torch_ddp'])}." in zero
    model = next(each.model for each in recorded if isinstance(each, DdpRun) and each.id == "f71421850cf7")
    assert model
    best_mb = math.sqrt(model.gradient_bytes * model.bytes_per_s * model.call_s) / 1e6
    equation = next(answer for question, answer in told.items() if question.startswith("Which equation"))
    assert f"= {best_mb:.0f} MB" in equation
    table = table_of(sections(answered)["Buckets of 1 to 1,000 MB: does the time match what was expected?"])
    for row in table.rows:
        n: Any = row["column 4"]
        serial_s: Any = row["column 2"]
        assert serial_s == pytest.approx(n * model.call_s + model.gradient_bytes / (n * model.bytes_per_s), rel=0.05)
    in_time = [row for row in table.rows if row["variant"] != "bucketed 1 MB"]  # that one waited for Python
    ratios = [row["column 0"] / row["column 2"] for row in in_time]  # type: ignore[operator]
    assert (
        f"{min(ratios):.2f}× to {max(ratios):.2f}×"
        in told["Buckets of 1 to 1,000 MB: does the time match what was expected?"]
    )


def table_of(section: Section) -> Table:
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    return table


def test_a_median_has_its_interval_a_failure_its_reason_and_bars_what_the_answer_is_about(tmp_path: Path) -> None:
    samples = tuple(0.1 + 0.001 * number for number in range(10))
    timing = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", host_s=samples),))
    asked: dict[str, object] = {"model": "tiny", "context": 64}
    records: list[Record] = [make_run(asked, timing=timing), out_of_memory({**asked, "context": 128})]
    path = tmp_path / "steps.toml"
    path.write_text(
        """title = "Steps"
[[chapter]]
title = "Time"
[[chapter.question]]
asks = "How long?"
rows_of = "runs"
rows = "context"
columns = [{ value = "steps" }, { value = "step_time_s", interval = true }, { value = "tokens_per_s" }]
figures.step = { value = "step_time_s", take = "max" }
answer = "{step}."
"""
    )
    section = sections(questions_document(load_questions(str(path)), records, nothing))["How long?"]
    table = table_of(section)
    assert table.rows[0]["column 1 ends"] == "101 ms to 108 ms"  # the second and the ninth of ten: 97.9 %
    assert [column.heading for column in table.columns][-1] == "tokens/s"
    assert "Failed: context 128 (out of memory: asked 8.00 GiB)" in table.caption
    assert not [block for block in section.blocks if isinstance(block, Bars)]  # a single bar says nothing


def test_bars_are_of_the_figure_in_the_answer_and_pooled_growth_says_so(factors: str) -> None:
    text = FACTORS.replace(
        'columns = [{ value = "step_time_s", against',
        'columns = [{ value = "steps" }, { value = "step_time_s", against',
    )
    text = text.replace('where = { precision = "bf16" }', 'where = { precision = ["bf16", "fp32"] }').replace(
        'rows = "model"\nacross = "context"', 'rows = ["model", "context", "precision"]'
    )
    Path(factors).write_text(text)
    found = sections(questions_document(load_questions(factors), of_factors(), nothing))["What does bf16 save?"]
    (bars,) = (block for block in found.blocks if isinstance(block, Bars))
    assert [bar.figure for bar in bars.bars] == ["1.00×", "0.50×", "1.00×", "0.25×"]
    assert "a doubling takes 3.0× (the median of 2 series)" in text_of(found)  # 2 and 4


def test_a_store_with_forward_passes_alone_leaves_questions_open() -> None:
    runs: list[Record] = [make_run({"model": "tiny", "pass": "forward"})]
    document = questions_document(load_questions("assignment"), runs, nothing)
    assert "steplab study sizes" in text_of(sections(document)["How long do forward and backward take?"])


def test_a_store_is_reported_by_questions_in_each_format(
    factors: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store.db"
    fill(path, *of_factors())
    for chosen in ("table", "md", "latex", "html", "json"):
        assert main(["report", "--questions", factors, "--format", chosen, "--store", str(path)]) == 0
        told = capsys.readouterr().out
        assert "At best 0.25×" in " ".join(told.split()) or chosen == "latex", chosen
        if chosen == "json":
            assert [row["question"] for row in json.loads(told)] == ["What does bf16 save?", "And fp16?"]
    picture = tmp_path / "figure.svg"
    asked = ["report", "--questions", factors, "--store", str(path)]
    assert main([*asked, "--chapter", "what does", "--output", str(picture)]) == 0
    assert picture.read_text().count("<svg") == 1
    capsys.readouterr()
    assert main([*asked, "--chapter", "and fp16", "--format", "svg"]) == 2
    assert "there is no picture" in capsys.readouterr().err
    assert main([*asked, "--chapter", "nothing"]) == 2
    assert "choose one of Answers, Timing" in capsys.readouterr().err
    assert main(["report", "--questions", "nothing", "--store", str(path)]) == 2
    assert "choose one of assignment" in capsys.readouterr().err


@pytest.mark.release
def test_latex_is_a_document_that_pdflatex_sets_with_its_pictures(answered: Document, tmp_path: Path) -> None:
    beside = Beside("answers_tex", "pdf")
    text = render(answered, "latex", beside=beside)
    assert set(re.findall(r"\\drawn\{\w+\}\{([^}]*)\}", text)) == {
        name for name in beside.files if name.endswith("pdf")
    }
    assert len(beside.files) > 20
    for name, content in beside.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        assert content.startswith(b"%PDF") or name.endswith(".csv")
    opened = re.findall(r"\\(begin|end)\{(\w+)\}", text)
    stack: list[str] = []
    for verb, name in opened:
        if verb == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert stack == []
    assert set(text) <= {chr(code) for code in range(256)}
    braces = re.sub(r"\\[{}]", "", text)
    assert braces.count("{") == braces.count("}")
    if not (pdflatex := shutil.which("pdflatex")):
        pytest.skip("pdflatex is missing: install a TeX")
    (tmp_path / "answers.tex").write_text(text)
    ended = subprocess.run([pdflatex, "-halt-on-error", "answers.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:]
