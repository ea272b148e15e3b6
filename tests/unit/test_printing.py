import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.ending import run, steering
from tests.fuzz.mutations import CONTROLS
from tests.unit.test_report_sections import EXAMPLES

from steplab.cli import output
from steplab.errors import SteplabError
from steplab.printing import leaving, plain, remark
from steplab.records.codec import decode, encode
from steplab.records.record import Record
from steplab.records.validation import check, cleaned
from steplab.report.kit.rendering import FORMATS
from steplab.store.database import Store

HOSTILE = "".join(text for text in CONTROLS if "\n" not in text)
FREE_TEXTS = ("name", "comment", "tags", "notes", "message", "hostname", "host", "cpu", "steplab_version",
              "gpu_names", "last_lines", "peak_source", "torch", "python")  # fmt: skip


def test_the_functions() -> None:
    assert plain("a\x1b[31mb\x1b[0m\tc\nd") == "ab\tc\nd"
    assert plain("\x1b]0;title\x07x\x9d0;title\x9cy\x9b1mz") == "xyz"
    assert plain("\x1bc\x07\r\x7f\x85\u202e\u2028\ud800") == r"\x1bc\x07\x0d\x7f\x85\u202e\u2028\ud800"
    assert plain("µ – 漢字 é") == "µ – 漢字 é"
    colored = "\x1b[1mbold\x1b[0m \x1b[32mgreen\x1b[0m"
    assert leaving(colored, "table", colored=True) == colored
    hostile = "\x1b[2J\x1b[31;5mx\x1b[1000C\x9b0m\x1b]8;;http://a\x07y\r"
    assert leaving(hostile, "table", colored=True) == r"xy\x0d"
    assert json.loads(leaving(json.dumps({"a": HOSTILE}, ensure_ascii=False), "json")) == {"a": HOSTILE}
    for kind in ("table", "json"):
        assert steering(leaving(HOSTILE, kind)) is None


def test_a_text_of_beginnings_alone_is_read_once() -> None:
    """Each once was followed to the end: a 60 kB trace with such a kernel name took a minute."""
    assert plain("\x9da\x9db\x07") == r"\x9da"
    for beginning in ("\x9d", "\x1b]", "\x9b", "\x1b["):
        assert "\x1b" not in plain(beginning * 100_000)


def hostile(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: hostile(content, name) for name, content in value.items()}
    if isinstance(value, list):
        return [hostile(content, key) for content in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) and key in FREE_TEXTS else value


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with Store.open(path, write=True) as opened:
        for record in EXAMPLES.values():
            opened.add(hostile_record(record))
    return path


def hostile_record(record: Record) -> Record:
    fields = json.loads(encode(record))
    changed = decode(json.dumps(hostile(fields)))
    with pytest.raises(SteplabError, match="control character"):
        check(changed)
    assert steering(encode(cleaned(changed)).decode()) is None
    assert HOSTILE in changed.name or HOSTILE in changed.steplab_version
    return changed


def test_nothing_that_steers_leaves_the_command_line_in_any_format(store: Path) -> None:
    commands = [["list", "--format", chosen] for chosen in FORMATS]
    commands += [["show", record.id, "--format", chosen] for record in EXAMPLES.values() for chosen in FORMATS]
    commands += [["show", EXAMPLES["run"].id, "--format", "html"]]
    commands += [["export"], ["explain", EXAMPLES["run"].id], ["show", HOSTILE], ["import", HOSTILE]]
    commands += [["run", f"--model={HOSTILE}"], ["list", "--where", HOSTILE], [HOSTILE], ["list", "--name", HOSTILE]]
    shown = 0
    for words in commands:
        end = run(*words, "--store", str(store))
        assert not end.faults, (words, end.faults)
        shown += r"\x7f" in end.stdout or r"\u007f" in end.stdout
    assert shown > 20  # the texts were there, written out


def test_colours_are_steplabs_own(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    from steplab.cli.app import main

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for words in (["list"], ["show", EXAMPLES["run"].id], ["show", EXAMPLES["ddp"].id]):
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        assert main([*words, "--store", str(store)]) == 0
        text = screen.getvalue()
        assert "\x1b[0m" in text
        for code in ("0", "1", "2", "31", "32", "36"):
            text = text.replace(f"\x1b[{code}m", "")
        assert steering(text) is None


def test_a_remark_does_not_steer_either(capsys: pytest.CaptureFixture[str]) -> None:
    output.say(f"wrote {HOSTILE}")
    output.emit(f'{{"name": "{HOSTILE}"}}'.replace("\r", ""), kind="json")
    shown = capsys.readouterr()
    assert steering(shown.err) is None
    assert steering(shown.out) is None


def test_the_middle_of_a_very_long_remark_is_left_out() -> None:
    text = remark("a" + "x" * 100_000 + "\x1b[31mz")
    assert len(text) < 2000
    assert (text[0], text[-1]) == ("a", "z")
    assert remark("short\x07") == "short\\x07"
