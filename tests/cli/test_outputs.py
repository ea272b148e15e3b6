import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cli.program import Program, complaint, finish, tiny

from steplab.specs.ddp import DdpStudy, variants_of
from steplab.specs.resolve import resolve_step

MEASURING = {
    "run": ("run", *tiny()),
    "sweep": ("sweep", *tiny()),
    "profile": ("profile", *tiny()),
    "memory": ("memory", *tiny()),
    "precision": ("precision", *tiny(), "--only", "audit"),
    "attention": ("attention", "--device", "cpu"),
    "comm": ("comm", "--processes", "2"),
    "ddp": ("ddp", "--processes", "2"),
    "explain --try": ("explain", "--try"),
}
READING = {
    "report": ("report",),
    "list": ("list",),
    "export": ("export",),
    "explain": ("explain",),
    "plan memory": ("plan", "memory"),
    "import-trace": ("import-trace", "missing.json"),
    "import-snapshot": ("import-snapshot", "missing.pickle"),
}
EVERY = MEASURING | READING


def _format(command: str) -> tuple[str, ...]:
    return ("--format", {"explain": "md", "explain --try": "md", "export": "jsonl"}.get(command, "csv"))


def _link(program: Program, name: str) -> Path:
    (program.cwd / name).symlink_to(program.store)
    return program.cwd / name


@pytest.mark.parametrize("command", EVERY)
def test_no_output_is_the_store(guarded: Program, command: str) -> None:
    said = complaint(guarded.here(*EVERY[command], *_format(command), "--output", guarded.store, "--force"), 2)
    assert said == f"steplab: cannot write to {guarded.store}: it is the store {guarded.store}; name another file"


def test_no_page_is_the_store(guarded: Program) -> None:
    assert "it is the store" in complaint(guarded.here("report", "--output", _link(guarded, "page.html")), 2)


@pytest.mark.parametrize("command", ["run", "report"])
def test_no_output_is_a_store_that_the_command_is_about_to_make(steplab: Program, command: str) -> None:
    given = ("--store", "new.csv", *_format(command), "--output", "./x/../new.csv")
    assert "it is the store new.csv" in complaint(steplab.here(*EVERY[command], *given), 2)
    assert list(steplab.cwd.iterdir()) == []


def _traces(program: Program) -> tuple[str, ...]:
    study = DdpStudy(step=resolve_step({}), processes=2, contenders=variants_of(["flat"], [1.0], ["collectives"]))
    (program.cwd / "traces").mkdir()
    _link(program, f"traces/{study.trace_name(1)}")
    return ("ddp", "--processes", "2", "--variants", "flat", "--traces", "traces")


def _marks(program: Program) -> tuple[str, ...]:
    _link(program, "kept.marks.json")
    return ("memory", *tiny(), "--snapshot", "kept.pickle")


RAW = {
    "trace": lambda program: ("profile", *tiny(), "--trace", str(_link(program, "kept.json"))),
    "snapshot": lambda program: ("memory", *tiny(), "--snapshot", str(_link(program, "kept.pickle"))),
    "marks": _marks,
    "traces": _traces,
}


@pytest.mark.parametrize("option", RAW)
def test_no_raw_file_is_the_store(guarded: Program, option: str) -> None:
    said = complaint(guarded.here(*RAW[option](guarded), "--force"), 2)
    assert f"it is the store {guarded.store}; name another file" in said
    assert [path for path in guarded.cwd.rglob("*") if not path.is_symlink() and path.is_file()] == []


@pytest.mark.parametrize("command", ["run", "export"])
def test_a_file_of_the_users_is_not_replaced(guarded: Program, command: str) -> None:
    mine = guarded.write("train.py", "import torch\n")
    said = complaint(guarded.here(*EVERY[command], *_format(command), "--output", "train.py"), 2)
    assert "train.py exists and does not say that steplab wrote it" in said
    assert said.endswith("name another file, or add --force to replace this one")
    assert mine.read_text() == "import torch\n"


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("report", ("page.html", "report.md")),
        ("export", ("records.jsonl", "records.jsonl.gz")),
        ("plan memory", ("report.md",)),
    ],
)
def test_an_earlier_output_is_replaced(guarded: Program, command: str, names: Sequence[str]) -> None:
    for name in names:
        for _ in range(2):
            assert guarded(*EVERY[command], "--output", name).stderr == f"wrote {name}\n"


def test_a_table_replaces_an_earlier_one_by_force_alone(guarded: Program) -> None:
    for name in ("rows.csv", "rows.json", "rows.md", "rows.tex", "rows.txt"):
        assert guarded("list", "--output", name).code == 0
        assert "does not say that steplab wrote it" in complaint(guarded.here("list", "--output", name), 2)
        assert guarded("list", "--output", name, "--force").code == 0
    assert (guarded.cwd / "rows.txt").read_text().startswith("id ")


def test_raw_files_replace_earlier_ones(steplab: Program, profiled_folder: Path, watched_folder: Path) -> None:
    for earlier in (*(profiled_folder / "work").iterdir(), *(watched_folder / "work").iterdir()):
        shutil.copy(earlier, steplab.cwd)
    names = ["kept.json.gz", "kept.marks.json", "kept.pickle"]
    before = [(steplab.cwd / name).stat().st_ino for name in names]
    assert steplab("profile", *tiny(), "--trace", "kept.json.gz").code == 0
    assert steplab("memory", *tiny(), "--snapshot", "kept.pickle").code == 0
    assert sorted(path.name for path in steplab.cwd.iterdir()) == names
    assert not set(before) & {(steplab.cwd / name).stat().st_ino for name in names}


@pytest.mark.parametrize(
    "arguments",
    [
        ("profile", *tiny(), "--trace", "both.json"),
        ("memory", *tiny(), "--snapshot", "both.pickle", "--format", "json"),
        ("memory", *tiny(), "--snapshot", "step.pickle"),
    ],
)
def test_two_outputs_of_a_command_are_two_files(guarded: Program, arguments: Sequence[str]) -> None:
    name = {"both.pickle": "both.pickle", "step.pickle": "step.marks.json"}.get(arguments[-1], "both.json")
    name = "both.pickle" if "both.pickle" in arguments else name
    assert "two outputs would go to" in complaint(guarded.here(*arguments, "--output", f"./{name}"), 2)


def test_devices_are_written_to(guarded: Program) -> None:
    assert guarded("list", "--output", "/dev/null").stderr == "wrote /dev/null\n"
    listed = finish(guarded.start("list", "--output", "/dev/stdout"))  # a process with a standard output of its own
    assert listed.stdout == guarded("list").stdout
