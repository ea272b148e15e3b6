"""Output of commands that read records, word for word, in tests/approved.

If a change is intended, `pytest tests/test_approved.py --approve` rewrites the files; commit them with the reason. A
case is a store of a few records. Its files hold all output in one format: terminals of 80 and 160 columns, md, json,
csv; records made by tests only have md.
"""

import difflib
import gzip
import json
import lzma
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests import comm_records, precision_records, profiles
from tests.advice_records import some_advice
from tests.attention_records import make_benchmark
from tests.cli.program import Program
from tests.ddp_records import make_ddp_run
from tests.stored_lines import import_lines
from tests.unit import memory_records

from steplab.lab.keeping import open_store
from steplab.records.record import Record

REPOSITORY = Path(__file__).parents[1]
APPROVED = Path(__file__).parent / "approved"
GOLDEN, RESULTS = "tests/golden", "benchmarks/results"
FORMATS = ("80", "160", "md", "json", "csv")
MOST_LINES = 40


@dataclass(frozen=True)
class Case:
    """Most lines of a difference in a failure."""

    ids: dict[str, str]
    commands: tuple[str, ...] = ()
    num_shown: int = 2
    made: Callable[[], Sequence[Record]] = tuple

    @property
    def formats(self) -> tuple[str, ...]:
        return FORMATS if self.ids else ("md",)


CASES = {
    "steps": Case(
        {f"{GOLDEN}/step_h200_202611.jsonl.gz": "5e7271880f12 b9d2b9d260d8 7f0440b406c5 e65926c7ad21 9876851457b6"},
        (
            "compare 5e7271880f12 7f0440b406c5 --allow compile",
            "compare 5e7271880f12 e65926c7ad21",
            "compare 5e7271880f12 e65926c7ad21 --allow context",
        ),
    ),
    "warmup": Case({f"{GOLDEN}/step_h200_202611.jsonl.gz": "57e8bb118b26 cab24eae7d88 69ec5a2c6fb6 56f48a48d720"}),
    "peers": Case(
        {f"{GOLDEN}/step_h200_202611.jsonl.gz": "d5b4537dc1a4 5a4bd0d0b3d8 c6682eb255a0 e9f67bc97142"},
        ("compare d5b4537dc1a4 5a4bd0d0b3d8 --allow model", "compare d5b4537dc1a4 c6682eb255a0", "history"),
    ),
    "noisy": Case(
        {f"{GOLDEN}/noisy_cpu_202611.jsonl.gz": "48235f11c41e 72118c4daf78 dcc01c6f3e0b 609bd691c108"},
        ("compare 48235f11c41e 72118c4daf78", "compare 48235f11c41e 609bd691c108 --threshold 20%", "history"),
    ),
    "own_model": Case(
        {f"{GOLDEN}/own_model_h200_202611.jsonl.gz": "f07c525645e0 b051fafb4fc7"},
        ("explain b051fafb4fc7", "compare b051fafb4fc7 f07c525645e0 --allow compile"),
        num_shown=1,
    ),
    "profiles": Case(
        {f"{GOLDEN}/profile_h200_202611.jsonl.gz": "9b3945c92596 91f54198c489 45b451602da4 be9cccff8e9c 14b9142cddb9"},
        ("explain 45b451602da4", "compare 14b9142cddb9 be9cccff8e9c --allow precision"),
        num_shown=1,
    ),
    "findings": Case(
        {f"{GOLDEN}/profile_h200_202611.jsonl.gz": "6eb3d5ddbcea f20918d2f6af ae700f99115f"},
        ("explain 6eb3d5ddbcea", "explain f20918d2f6af", "explain ae700f99115f"),
        num_shown=0,
    ),
    "memory": Case(
        {f"{GOLDEN}/memory_h200_202611.jsonl.xz": "c0910d900cfe 27f06a5e67ca b983da59ddf6"},
        ("compare b983da59ddf6 27f06a5e67ca --allow precision",),
    ),
    "precision": Case(
        {f"{GOLDEN}/precision_h200_202611.jsonl.xz": "b02e4bc3c875 b11fba59a313 24e7864a5f18 f6693b1bef11"}
    ),
    "attention": Case(
        {
            f"{RESULTS}/attention_h200_202611.jsonl.gz": "9b86a0bed7b0 1122290421c8",
            f"{RESULTS}/other_gpu_h100_202611.jsonl.gz": "d78775b6e11a",
        },
        ("compare 1122290421c8 d78775b6e11a --allow device",),
        num_shown=1,
    ),
    "comm": Case({f"{RESULTS}/comm_h200_202611.jsonl.gz": "1aeade5cce29"}),
    "ddp": Case({f"{RESULTS}/ddp_update_h200_202611.jsonl.gz": "5db0e0a044d6 803eac21993f"}, num_shown=1),
    "other_gpu": Case(
        {f"{RESULTS}/other_gpu_h100_202611.jsonl.gz": "0c35d93efd27 20fbad2c5c65 bff347ede4f0 2ac12ca4b74e"},
        ("compare bff347ede4f0 2ac12ca4b74e --allow compile", "history"),
    ),
    "layouts": Case(
        {f"{RESULTS}/layout_h200_202611.jsonl.gz": "f0564b3f0e1a dd1ad734af96 12cd4c5a0ddf"},
        ("compare f0564b3f0e1a dd1ad734af96 --allow layout",),
        num_shown=1,
    ),
    "walk": Case(
        {f"{RESULTS}/walk_h200_202611.jsonl.gz": "236a4ed32e14 76558195ed1b 8e3728f304ab 85d8b94e928b"},
        ("compare 76558195ed1b 8e3728f304ab --allow compile",),
        num_shown=1,
    ),
    "made_memory": Case(
        {}, tuple(f"show {number:02d}{number:02d}" for number in range(1, 8)), made=memory_records.told_runs
    ),
    "made_profiles": Case({}, ("show 0101", "show 0202", "show 0303", "explain 0303"), made=profiles.told_runs),
    "made_precision": Case({}, ("report",), made=precision_records.told_records),
    "made_attention": Case({}, ("report",), made=lambda: [make_benchmark("peers")]),
    "made_comm": Case({}, ("report c0ffee000001", "report c0ffee000002"), made=comm_records.told_benchmarks),
    "made_ddp": Case({}, ("report",), made=lambda: [make_ddp_run(broken=("flat",))]),
    "made_walk": Case({}, ("report",), made=lambda: [some_advice()]),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    files = {file: _lines(REPOSITORY / file) for case in CASES.values() for file in case.ids}
    made = {}
    for name, case in CASES.items():
        program = made[name] = Program(tmp_path_factory.mktemp(name))
        with open_store(program.store, write=True) as store:
            import_lines(store, (files[file][one] for file, ids in case.ids.items() for one in ids.split()))
            for record in case.made():
                store.add(record)
    with (
        pytest.MonkeyPatch.context() as patched,
        patch("steplab.lab.explaining.now_utc", lambda: "2026-11-21T00:00:00Z"),
    ):
        patched.setenv("TZ", "UTC")
        patched.setattr("steplab.__version__", "0")
        time.tzset()
        yield made
    time.tzset()


@pytest.mark.parametrize(("name", "format"), [(name, kind) for name in CASES for kind in CASES[name].formats])
def test_the_commands_print_what_was_approved(
    name: str, format: str, programs: dict[str, Program], request: pytest.FixtureRequest
) -> None:
    program = programs[name]
    text = "".join(_printed(program, words.split(), format) for words in _commands(CASES[name], format))
    path = _path(name, format)
    if request.config.getoption("--approve"):
        path.write_text(text, encoding="utf-8")
    approved = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != approved:
        lines = list(
            difflib.unified_diff(approved.splitlines(), text.splitlines(), "approved", "printed", "", "", 1, "")
        )
        more = [f"and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
        again = f"if this is wanted: pytest {Path(__file__).relative_to(REPOSITORY)} --approve"
        pytest.fail("\n".join((*lines[:MOST_LINES], *more, again)), pytrace=False)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", ["steps", "noisy", "memory", "precision", "attention", "comm", "ddp", "layouts"])
def test_no_line_is_wider_than_its_terminal(name: str, width: int) -> None:
    """The other cases have lines of code to copy, which stay whole."""
    lines = _path(name, str(width)).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > width and not line.startswith(("$ steplab", "steplab: "))] == []


def test_nothing_else_is_approved() -> None:
    assert set(APPROVED.iterdir()) == {_path(name, kind) for name in CASES for kind in CASES[name].formats}


def _path(name: str, format: str) -> Path:
    return APPROVED / f"{name}.{format}{'.txt' if format.isdigit() else ''}"


def _commands(case: Case, format: str) -> list[str]:
    ids = [one for some in case.ids.values() for one in some.split()]
    every = ["list", *(f"show {one}" for one in ids[: case.num_shown]), "report"] if ids else []
    words = [*every, *case.commands]
    return [some for some in words if format != "160" or not some.startswith(("show", "explain"))]


def _printed(program: Program, words: list[str], format: str) -> str:
    program.environment["COLUMNS"] = format if format.isdigit() else "80"
    result = program.here(*words, *(() if format.isdigit() else ("--format", format)))
    out = (
        _without_the_record(result.stdout, words[1], program)
        if (words[0], format) == ("show", "json")
        else result.stdout
    )
    code = f"exit code {result.code}\n" if result.code else ""
    return f"$ steplab {' '.join(words)}\n{out}{result.stderr}{code}\n"


def _without_the_record(text: str, id: str, program: Program) -> str:
    shown: dict[str, Any] = json.loads(text)
    added = {"summary": shown.pop("summary", None)}
    exported: dict[str, Any] = json.loads(program.here("export", id).stdout)
    assert shown == {key: value for key, value in exported.items() if key != "summary"}
    return json.dumps(added, indent=2, ensure_ascii=False) + "\n"


def _lines(path: Path) -> dict[str, bytes]:
    open_: Any = gzip.open if path.suffix == ".gz" else lzma.open
    with open_(path, "rb") as file:
        return {json.loads(line)["id"]: line for line in file}
