import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.cli.program import Program, finish
from tests.runs import make_run, out_of_memory, recorder_run

import steplab
from steplab.records.codec import encode

SOURCE = Path(steplab.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION = 500, 80

ARROWS = {
    "errors": set(),
    "stats": set(),
    "units": {"errors"},
    "printing": set(),
    "limits": {"units"},
    "unpacking": {"limits", "units"},
    "python": set(),
    "git": set(),
    "specs": {"unpacking", "units", "errors"},
    "records": {"specs", "stats", "printing", "units", "errors"},
    "costs": {"specs", "units", "errors"},
    "ops": set(),
    "parallel": set(),
    "reading": {"costs", "records", "stats", "python", "limits", "unpacking", "units", "errors"},
    "plan": {"costs", "records", "specs", "stats", "units", "errors"},
    "fake_step": {"costs", "measurement", "model", "plan", "records", "specs", "errors"},
    "explain": {"costs", "records", "specs", "stats", "units", "errors"},
    "comparison": {"records", "specs", "stats", "units", "errors"},
    "model": {"ops", "specs", "errors"},
    "measurement": {"model", "ops", "parallel", "records", "specs", "python", "git", "printing", "units", "errors"},
    "store": {"records", "specs", "units", "errors"},
    "report": {"comparison", "costs", "records", "specs", "stats", "printing", "units", "errors"},
    "lab": {
        *("measurement", "comparison", "costs", "explain", "reading", "plan", "fake_step", "store"),
        *("records", "specs", "git", "limits", "unpacking", "printing", "units", "errors"),
    },
    "views": {"lab", "report", "records", "specs", "printing", "measurement", "errors"},
    "integrations": {"lab", "measurement", "records", "specs", "errors"},
    "cli": {
        *("integrations", "views", "lab", "report", "measurement"),
        *("records", "specs", "limits", "unpacking", "printing", "units", "errors"),
    },
    "__main__": {"cli"},
    "__init__": {"views", "lab", "store", "records", "specs", "errors"},
}
"""Part -> parts that it may import, besides itself, also for type checking."""

FACTS = (
    "steplab.ops.attention.implementations",
    "steplab.ops.attention.choice_rule",
    "steplab.ops.attention.hopper_kernels",
    "steplab.ops.triton_places",
    "steplab.parallel.sizes",
    "steplab.parallel.errors",
    "steplab.ops.errors",
)
"""Tables and arithmetic that import only each other, so that they can be copied and read without the rest. All may
import them, like `errors`.
"""

PROGRESS = {"steplab.measurement.progress.Progress", "steplab.measurement.progress.OnProgress"}
"""Measurement modules that the command line and views may use: they report progress and start nothing."""

TORCH_FREE = [
    "errors",
    "units",
    "limits",
    "printing",
    "unpacking",
    "stats",
    "specs",
    "records",
    "costs",
    "python",
    "git",
    "reading",
    "plan",
    "explain",
    "comparison",
    "store",
    "report",
    "views",
    "cli",
    "lab",
    "integrations.tracking",
    "measurement.jobs",
    "measurement.processes",
    "__main__",
]


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


class Facts(NamedTuple):
    imports: list[tuple[int, str]]
    functions: list[tuple[str, int]]
    begins_early: bool


@cache
def facts_of(path: Path) -> Facts:
    module = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(module))
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return Facts(
        imports=list(_imports(path, nodes)),
        functions=[(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions],
        begins_early=any(
            isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
            for statement in module.body[:-1]
        ),
    )


def imports(path: Path) -> list[tuple[int, str]]:
    return facts_of(path).imports


def _imports(path: Path, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    package = ["steplab", *path.relative_to(SOURCE).parts[:-1]]
    for node in nodes:
        names: list[str] = []
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and _is_import_module(node.func):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            if name.partition(".")[0] == "steplab":
                yield line, name


def _is_import_module(function: ast.expr) -> bool:
    return "import_module" in (getattr(function, "id", None), getattr(function, "attr", None))


def violations(path: Path) -> Iterator[str]:
    part = part_of(path)
    for line, name in imports(path):
        if name == "steplab.__version__" or f"{name}.".startswith(tuple(f"{facts}." for facts in FACTS)):
            continue
        imported = [*name.split("."), "the whole package"][1]
        allowed = imported == part or imported in ARROWS[part]
        if part in ("cli", "views") and imported == "measurement":
            allowed = name in PROGRESS
        if not allowed:
            yield f"{path.relative_to(SOURCE)}:{line} {part} -> {name}"


# --- arrows -----------------------------------------------------------------------------------------------


def test_every_part_of_the_package_has_its_arrows() -> None:
    assert {part_of(path) for path in FILES} == set(ARROWS)


STUDY = {"jobs", "step", "clock", "runner", "machine", "observer", "compat", "tensors"}
WITHIN_MEASUREMENT: dict[str, set[str]] = {
    "compat": set(),
    "observer": set(),
    "progress": set(),
    "tensors": set(),
    "machine": {"observer", "compat"},
    "recorder": {"step", "machine"},
    "clock": {"machine"},
    "ceilings": {"clock", "machine", "observer"},
    "runner": {"machine", "observer"},
    "jobs": {"machine", "observer"},
    "processes": {"jobs", "machine", "clock", "progress", "observer", "compat"},
    "step": {"clock", "machine", "observer", "compat", "tensors"},
    "attention": STUDY,
    "comm": STUDY,
    "ddp": STUDY,
    "precision": STUDY,
    "memory": STUDY,
    "profile": STUDY,
    "step_job": STUDY | {"memory", "profile"},
}
"""Folder or file of measurement -> those that it may import. Studies do not import each other."""


@pytest.mark.parametrize("part", sorted(WITHIN_MEASUREMENT))
def test_imports_within_measurement_point_downwards(part: str) -> None:
    root = SOURCE / "measurement"
    parts = {path: path.relative_to(root).parts[0].removesuffix(".py") for path in root.rglob("*.py")}
    assert set(parts.values()) == {"__init__", *WITHIN_MEASUREMENT}
    prefix, allowed = "steplab.measurement.", WITHIN_MEASUREMENT[part] | {part}
    names = [name for path in parts if parts[path] == part for _, name in imports(path) if name.startswith(prefix)]
    assert [name for name in names if name.removeprefix(prefix).split(".")[0] not in allowed] == []


@pytest.mark.parametrize("study", ["comm", "ddp"])
def test_few_files_know_a_study_by_its_name(study: str) -> None:
    """A new study has its own files and an entry in each of these; `steplab study` needs another."""
    parts = tuple(f"steplab.{part}.{study}." for part in ("records", "measurement", "report", "lab", "cli.commands"))
    own = {path for path in FILES if study in path.with_suffix("").relative_to(SOURCE).parts}
    own |= {path for path in FILES if path.stem.startswith(f"{study}_")}
    others = {path for path in FILES for _, name in imports(path) if name.startswith(parts)} - own
    shared = {"measurement/jobs.py", "records/registry.py", "lab/sweeping.py", "__init__.py"}
    read_its_records = {
        "ddp": {"reading/traces/communication.py"},
        "comm": {"plan/layout/links.py", "lab/layout_planning.py"},
    }
    assert {str(path.relative_to(SOURCE)) for path in others} == shared | read_its_records[study]


def test_the_arrows_within_measurement_make_no_circle() -> None:
    assert list(TopologicalSorter(WITHIN_MEASUREMENT).static_order())


def test_the_files_of_specs_make_no_circle() -> None:
    arrows = {
        f"steplab.specs.{path.stem}": {name.rpartition(".")[0] for _, name in imports(path)}
        for path in FILES
        if part_of(path) == "specs"
    }
    assert list(TopologicalSorter(arrows).static_order())


@pytest.mark.parametrize("facts", FACTS)
def test_facts_import_each_other_alone(facts: str) -> None:
    found = imports(SOURCE.joinpath(*facts.split(".")[1:]).with_suffix(".py"))
    assert {name.rpartition(".")[0] for _, name in found} <= set(FACTS)


@pytest.mark.parametrize("part", sorted(ARROWS))
def test_imports_point_downwards(part: str) -> None:
    found = [line for path in FILES if part_of(path) == part for line in violations(path)]
    assert found == []


def test_the_arrows_make_no_circle() -> None:
    assert list(TopologicalSorter(ARROWS).static_order())


@pytest.mark.parametrize(
    ("part", "source", "name"),
    [
        ("ops/attention/x.py", "from steplab.specs.step import StepSpec", "steplab.specs.step.StepSpec"),
        ("records/x.py", "if TYPE_CHECKING:\n    import steplab.report.html", "steplab.report.html"),
        ("report/x.py", "def f():\n    from ..lab import measuring", "steplab.lab.measuring"),
        ("stats.py", "from steplab import units", "steplab.units"),
        ("store/x.py", "importlib.import_module('steplab.lab')", "steplab.lab"),
        ("cli/x.py", "from steplab.measurement.processes.launch import measure_in_child", "launch.measure_in_child"),
        ("model/x.py", "import steplab", "steplab"),
    ],
)
def test_an_arrow_that_points_upwards_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, source: str, name: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    path = tmp_path / part
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (found,) = violations(path)
    assert found.endswith(name)


# --- without torch ----------------------------------------------------------------------------------------

BLOCKED = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"torch was asked for ({name})", name="torch")

sys.meta_path.insert(0, NoTorch())
"""


def in_a_fresh_process(code: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(SOURCE.parent)!r})\n{code}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def modules_of(part: str) -> list[str]:
    found = importlib.import_module(f"steplab.{part}")
    inner = pkgutil.walk_packages(found.__path__, f"{found.__name__}.") if hasattr(found, "__path__") else ()
    return [found.__name__, *(module.name for module in inner)]


COMMANDS = f"""{BLOCKED}
import contextlib, importlib, io, json
from steplab.cli.app import main

try:
    import torch
except ModuleNotFoundError as error:
    assert "torch was asked for" in str(error)
modules, commands = json.loads(sys.argv[1])
for name in modules:
    importlib.import_module(name)
said = []
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0, words
    said.append(out.getvalue())
assert "torch" not in sys.modules
print(json.dumps(said))
"""


def test_without_torch_all_that_needs_none_is_imported_helps_plans_and_reports(tmp_path: Path) -> None:
    modules = [name for part in TORCH_FREE for name in modules_of(part)]
    assert len(modules) > len(TORCH_FREE)
    runs = [make_run({"context": 128}), make_run({"context": 256}), out_of_memory({"model": "xl"}), recorder_run()]
    (tmp_path / "runs.jsonl").write_bytes(b"\n".join(map(encode, runs)))
    store = ["--store", str(tmp_path / "store.db")]
    step = ["--model", "2.7b", "--context", "512", "--precision", "bf16"]
    formats = ("table", "json", "csv", "md", "latex", "html")
    commands = [
        ["import", str(tmp_path / "runs.jsonl"), *store],
        *([*words, "--help"] for words in ([], ["run"], ["sweep"], ["report"])),
        ["--version"],
        ["plan", "memory", *step],
        ["plan", "time", *step],
        ["plan", "accounting", "--model", "xxl"],
        ["list", "--format", "json", *store],
        *(["report", "--format", name, *store] for name in formats),
    ]
    _, *said = json.loads(in_a_fresh_process(COMMANDS, json.dumps([modules, commands])))
    assert all(text.strip() for text in said)
    listed, *reports = said[-1 - len(formats) :]
    assert [run.id for run in runs if run.id not in listed] == []
    for name, reported in zip(formats, reports, strict=True):
        assert "small" in reported, name
        assert "my finetuning" in reported, name
        assert reported.lower().startswith("<!doctype html>") == (name == "html")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "before = set(sys.modules)\nimport steplab\nprint(*sorted(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in in_a_fresh_process(code).split()}
    assert loaded - set(sys.stdlib_module_names) == {"steplab"}


# --- the public interface ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", steplab.__all__)
def test_every_public_name_resolves_and_is_what_it_is_called(name: str) -> None:
    value = getattr(steplab, name)
    assert getattr(value, "__name__", name) == name
    assert name in dir(steplab)
    assert isinstance(value, str) or value.__doc__


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'mesure'"):
        _ = steplab.mesure


# --- order ------------------------------------------------------------------------------------------------


def test_a_program_begins_when_all_of_its_file_is_defined() -> None:
    assert [path for path in FILES if facts_of(path).begins_early] == []


# --- length -----------------------------------------------------------------------------------------------


def test_files_can_be_read_in_one_sitting() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_functions_can_be_read_in_one_sitting() -> None:
    functions = [(path, name, lines) for path in FILES for name, lines in facts_of(path).functions]
    assert [function for function in functions if function[2] > LONGEST_FUNCTION] == []


WITHOUT_TRITON = """
import importlib, pkgutil, sys
from steplab.ops import torch_library
torch_library._library._destroy()  # its operators are defined again
for name in list(sys.modules):
    if name.partition(".")[0] in ("steplab", "triton"):
        del sys.modules[name]
sys.modules["triton"] = None
import steplab.lab, steplab.measurement, steplab.model
for package in (steplab.lab, steplab.measurement, steplab.model):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import steplab.parallel.data_parallel
"""


def test_measuring_imports_no_triton_which_a_cpu_build_of_torch_lacks(tmp_path: Path) -> None:
    ended = finish(Program(tmp_path).start("-c", WITHOUT_TRITON, module="python"))
    assert ended.code == 0, ended.stderr
