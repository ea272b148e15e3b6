import importlib
import inspect
import json
import pydoc
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.profiles import profiled_run
from tests.runs import make_run, recorder_run
from tests.stored_lines import fill

import steplab
from steplab.cli.app import main
from steplab.errors import Remark, SteplabError, UserError
from steplab.records.codec import encode_with_summary

COMMANDS = {path.stem.strip("_") for path in (Path(steplab.__file__).parent / "cli" / "commands").glob("[!_]*.py")}
UNDER_ANOTHER_NAME: dict[str, str | None] = {"run": "measure", "list": "list_records", "import": "import_files"}
UNDER_ANOTHER_NAME |= {"rm": "Store", "export": "Store", "store": "Store", "completion": None}


# --- warnings ---------------------------------------------------------------------------------------------


def test_a_warning_points_to_the_line_that_called_steplab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("steplab.store.connection.network_file_system", lambda path: "nfs4")
    record = tmp_path / "record.jsonl"
    record.write_bytes(encode_with_summary(make_run()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", Remark)
        steplab.plan_time("tiny", recipe="fast")
        steplab.import_files([record], store=tmp_path / "store.db")
    code, first = inspect.getsourcelines(test_a_warning_points_to_the_line_that_called_steplab)
    assert [(each.filename, code[each.lineno - first].strip().partition("(")[0]) for each in told] == [
        (__file__, "steplab.plan_time"),
        (__file__, "steplab.import_files"),
    ]


# --- names ------------------------------------------------------------------------------------------------


def test_every_command_has_a_function_in_python() -> None:
    for command in COMMANDS:
        name = UNDER_ANOTHER_NAME.get(command, command)
        assert name is None or callable(getattr(steplab, name)), command


def test_help_shows_every_function_with_its_docstring() -> None:
    text = pydoc.plain(pydoc.render_doc(steplab))
    functions = text.partition("\nFUNCTIONS\n")[2].partition("\nDATA\n")[0]
    for name in steplab.__all__:
        value = getattr(steplab, name)
        if inspect.isroutine(value):
            assert re.search(rf"^ +{name}\(", functions, re.MULTILINE), name
            assert inspect.getdoc(value), name


def test_a_folder_does_not_take_the_place_of_a_function() -> None:
    names = ("explain", "plan", "report")
    for name in names:
        importlib.import_module(f"steplab.{name}")
        assert inspect.isfunction(getattr(steplab, name))
    code = f"import inspect, steplab.plan, steplab\nfrom steplab import {', '.join(names)}\n"
    code += f"assert all(map(inspect.isfunction, ({', '.join(names)})))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_paths_may_be_texts() -> None:
    for name in steplab.__all__:
        value = getattr(steplab, name)
        for parameter in inspect.signature(value).parameters.values() if inspect.isroutine(value) else ():
            if "Path" in str(parameter.annotation):
                assert re.search(r"\bstr\b", str(parameter.annotation)), f"{name}({parameter})"


# --- the same study as the command ------------------------------------------------------------------------


class Asked(Exception):
    pass


BOTH_WAYS: dict[str, tuple[str, list[str], Any]] = {
    "attention": (
        "steplab.lab.attention.measure_attention",
        ["attention", "--sequence", "16,32", "--dim", "8", "--implementation", "plain", "--device", "cpu"],
        lambda: steplab.attention(sequence=[16, 32], dim=8, implementation="plain", device="cpu"),
    ),
    "comm": (
        "steplab.lab.comm.measure_comm",
        ["comm", "--processes", "2", "--size", "1kB", "--collective", "all_reduce,broadcast"],
        lambda: steplab.comm(processes=2, size="1kB", collective=["all_reduce", "broadcast"]),
    ),
    "ddp": (
        "steplab.lab.ddp.measure_ddp",
        ["ddp", "--processes", "2", "--model", "tiny", "--variants", "bucketed:1,sharded", "--steps", "5"],
        lambda: steplab.ddp("tiny", processes=2, variants=["bucketed:1", "sharded"], steps=5),
    ),
    "study": (
        "steplab.lab.sweeping.sweep",
        ["study", "quick", "--context", "32"],
        lambda: steplab.study("quick", context=32),
    ),
}


@pytest.mark.parametrize("verb", sorted(BOTH_WAYS))
def test_python_asks_for_what_the_command_asks_for(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, command, call = BOTH_WAYS[verb]
    asked: list[object] = []

    def measure(study: object, **options: object) -> None:
        asked.append((study, options.get("precisions"), options.get("parts"), options.get("device")))
        raise SteplabError("not measured")

    module, _, name = place.rpartition(".")
    monkeypatch.setattr(sys.modules.get(module) or importlib.import_module(module), name, measure)
    if verb == "study":
        monkeypatch.setattr("steplab.cli.sweeps.sweep", measure)
    assert main(command) == 1
    with pytest.raises(SteplabError, match="not measured"):
        call()
    by_command, by_python = asked
    assert str(by_command).replace("['audit']", "('audit',)") == str(by_python).replace(
        "['audit']", "('audit',)"
    ).replace("['bf16']", "('bf16',)")


def test_a_plan_has_memory_and_time() -> None:
    planned = steplab.plan("small", context=64, precision="bf16", gpu="H100 SXM")
    memory = steplab.plan_memory("small", context=64, precision="bf16", gpu="H100 SXM")
    every_card = steplab.plan_memory("small", context=64, precision="bf16").cards
    assert planned.memory == replace(memory, cards=every_card)
    assert planned.time == steplab.plan_time("small", context=64, precision="bf16", gpu="H100 SXM")
    assert "H100 SXM" in str(steplab.show(planned))
    for found in (planned, planned.memory, planned.time):
        assert "\n" not in repr(found)
        assert "small" in repr(found)
        assert len(repr(found)) < 200
    assert steplab.plan_accounting("xxl").model == "xxl"
    with pytest.raises(UserError, match="unknown field 'contxt'"):
        steplab.plan("small", contxt=64)


# --- what can be looked at --------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> str:
    path = str(tmp_path / "store.db")
    fill(path, *(make_run({"context": 128}), recorder_run(), profiled_run(), make_comm()))
    return path


def test_a_shown_record_is_text_at_a_prompt_and_what_the_command_writes(
    filled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = profiled_run()
    view = steplab.show(run.id, store=filled)
    for chosen in ("table", "json", "md"):
        assert main(["show", run.id, "--format", chosen, "--store", filled]) == 0
        assert capsys.readouterr().out.rstrip("\n") == view.render(chosen).rstrip("\n")
    assert repr(view) == str(view) == view.render()
    assert json.loads(steplab.show(make_run(), store=filled).render("json")) == json.loads(
        encode_with_summary(make_run())
    )
    with pytest.raises(UserError, match="unknown format 'pdf'"):
        view.render("pdf")


def test_a_record_that_is_in_no_store_is_shown(tmp_path: Path) -> None:
    assert "Where the time goes" in str(steplab.show(profiled_run(), store=tmp_path / "none.db"))


def test_a_report_takes_records_and_ids(filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run({"context": 128}), make_run({"context": 512})]
    page = steplab.report(runs, store=filled, title="Two contexts").save(tmp_path / "page.html")
    text = page.read_text()
    assert "<title>Two contexts</title>" in text
    assert all(run.id in text for run in runs)
    assert main(["report", runs[0].id, "--format", "md", "--store", filled]) == 0
    assert steplab.report(runs[0].id, store=filled).render("md").strip() == capsys.readouterr().out.strip()


def test_a_report_replaces_no_file_of_another_kind(filled: str, tmp_path: Path) -> None:
    view = steplab.report(store=filled)
    taken = tmp_path / "page.html"
    taken.write_text("mine")
    with pytest.raises(UserError):
        view.save(taken)
    view.save(str(taken), force=True)
    assert view.save(taken).read_text().startswith("<!doctype html>")
    with pytest.raises(UserError):
        view.save(filled, "html", force=True)
    with pytest.raises(UserError, match="unknown format for"):
        view.save(tmp_path / "page.pdf")


def test_records_are_compared_and_shown_over_commits(filled: str) -> None:
    before, after = make_run({"context": 128}), make_run({"context": 128}, seed=1)
    found = steplab.compare(before, [after])
    assert found.outcome == "fine"
    assert steplab.compare(before.id, after, store=filled).outcome == "fine"
    assert before.id in str(steplab.show(found))
    assert "small" in str(steplab.show(steplab.history("step_time", store=filled)))
    with pytest.raises(UserError, match="at least one on each side"):
        steplab.compare(before, [])


def test_findings_are_shown_with_their_run(filled: str) -> None:
    findings = steplab.explain(profiled_run().id, store=filled)
    assert findings.findings[0].title in repr(findings)
    text = str(steplab.show(findings, store=filled))
    assert findings.findings[0].title in text


# --- in a notebook ----------------------------------------------------------------------------------------


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag not in ("br", "meta", "path", "use", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.mark.parametrize("record", [make_run(), profiled_run(), make_benchmark(), make_comm()], ids=lambda r: r.schema)
def test_a_notebook_shows_a_table_and_a_picture(record: Any) -> None:
    steplab.Record  # noqa: B018  # as `import steplab` and any use of it do
    text = record._repr_html_()
    seen = Seen(text)
    assert {"table", "style", "h1"} <= set(seen.tags)
    assert "svg" in seen.tags or 'class="bars"' in text
    assert not {"script", "link", "iframe", "html", "body"} & set(seen.tags)
    assert [link for link in seen.links if not link.startswith("#")] == []
    assert "@import" not in text
    assert "url(http" not in text
    assert seen.open == []


def test_the_style_of_a_notebook_concerns_steplabs_element_alone() -> None:
    text = steplab.show(make_run())._repr_html_()
    style = text.partition("<style>")[2].partition("</style>")[0].strip()
    assert style.startswith(".steplab {")
    depth = 0
    for number, character in enumerate(style):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth > 0 or number < len(".steplab ") or number == len(style) - 1
    assert not re.search(r"^(html|body|:root)\b", style, re.MULTILINE)
    assert "<nav" not in text
