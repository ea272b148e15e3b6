import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cyclopts import CycloptsError
from tests.cli.program import REPOSITORY, Program, finish

from steplab.cli.app import app

README = REPOSITORY / "README.md"
SHELLS = ("sh", "bash", "shell", "console")
NOT_RUN = ("# needs a GPU", "# takes minutes", "steplab doctor")  # which test_run runs
FOR_A_SHELL = frozenset("|&;<>$`*?~\\")
SET_UP = re.compile(r"python3? -m (venv|pip|pytest|build)\b")
MEASURING = ("run", "profile", "memory", "sweep", "study", "ddp")
"""Commands that take a number of steps, of which few are enough."""
SMALL = {"ddp": ("--model.num-layers", "1", "--context", "16"), "comm": ("--collective", "all-reduce,all-gather")}
"""Options that shorten a command."""
COMMAND_TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True, kw_only=True)
class Piece:
    line: int
    language: str
    text: str
    answer: str = ""

    @property
    def is_run(self) -> bool:
        return not any(words in self.text for words in NOT_RUN)

    def __str__(self) -> str:
        return f"README.md line {self.line}: {self.text}"


def blocks(markdown: str) -> Iterator[Piece]:
    fence = re.compile(r"^( *)(`{3,}|~{3,})([\w+-]*)[^\n]*\n(.*?)^ *\2 *$", re.MULTILINE | re.DOTALL)
    for found in fence.finditer(markdown):
        indent = len(found[1])
        text = "".join(line[min(indent, len(line) - len(line.lstrip(" "))) :] for line in found[4].splitlines(True))
        yield Piece(line=markdown.count("\n", 0, found.start(4)) + 1, language=found[3].lower(), text=text)


def commands(block: Piece) -> Iterator[Piece]:
    pending, started, found = "", block.line, list[Piece]()
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if not pending:
            started = number
            if block.language == "console" and not line.startswith("$ "):
                found[-1] = replace(found[-1], answer=f"{found[-1].answer} {line}")
                continue
        text = pending + line.removeprefix("$ ").strip()
        if text.endswith("\\"):
            pending = text[:-1].rstrip() + " "
            continue
        pending = ""
        if text and not text.startswith("#"):
            found.append(Piece(line=started, language="sh", text=text))
    yield from found


def pieces() -> list[Piece]:
    found: list[Piece] = []
    for block in blocks(README.read_text(encoding="utf-8")):
        if block.language in SHELLS:
            found += commands(block)
        elif block.language in ("python", "py"):
            found.append(block)
    return found


def is_ours(piece: Piece) -> bool:
    return (
        piece.language == "sh" and bool(re.match(r"(steplab|python3?)\s", piece.text)) and not SET_UP.match(piece.text)
    )


def newest_id(program: Program) -> str:
    rows = program.rows()
    assert rows, "README.md names an ID before any command has made a run"
    return str(rows[0]["id"])


def says(output: str, answer: str) -> bool:
    """True if an output has an answer's words, with figures within 5 %: refitting shifts predictions slightly."""
    number = r"\d+(?:\.\d+)?"
    words = [re.escape(part) for part in re.split(number, " ".join(answer.split()))]
    found = re.search(f"({number})".join(words), " ".join(output.split()))
    shown = re.findall(number, answer)
    return found is not None and all(
        abs(float(now) - float(then)) <= 0.05 * float(then) for now, then in zip(found.groups(), shown, strict=True)
    )


def run_piece(program: Program, piece: Piece) -> None:
    if piece.language == "sh":
        text = re.sub(r"(?<![\w-])ID(?![\w=])", lambda _: newest_id(program), piece.text)
        command, *words = shlex.split(text, comments=True)
        if command == "steplab" and FOR_A_SHELL.isdisjoint(text):
            if words[0] in MEASURING and "--steps" not in words:
                words += ["--warmup", "1", "--steps", "3"]
            words += SMALL.get(words[0], ())
            result = program(*words, timeout_s=COMMAND_TIMEOUT_S)
            assert result.code == 0, f"{piece}\n{result.stdout}\n{result.stderr}"
            assert says(result.stdout, piece.answer), f"{piece}\n{result.stdout}"
            return
    else:
        result = finish(program.start("-c", piece.text, module="python"), COMMAND_TIMEOUT_S)
        assert result.code == 0, f"{piece}\n{result.stdout}\n{result.stderr}"
        return
    finished = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=program.cwd,
        env=program.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, f"{piece}\n{finished.stdout}\n{finished.stderr}"


def check_without_running(program: Program, piece: Piece) -> None:
    words = shlex.split(piece.text, comments=True)
    if words[0] != "steplab":
        scripts = [word for word in words[1:] if word.endswith(".py")]
        assert all((program.cwd / script).exists() for script in scripts), str(piece)
    elif words[1] in ("sweep", "study"):
        result = program(*words[1:], "--dry-run")
        assert result.code == 0, f"{piece}\n{result.stderr}"
    else:
        try:
            _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
        except CycloptsError as error:
            pytest.fail(f"{piece}\n{error}")
        if words[1] == "run":
            bound.arguments["measured"].spec()


def test_every_command_and_every_piece_of_python_works_in_its_order(reader: Program) -> None:
    ours = [piece for piece in pieces() if is_ours(piece) or piece.language != "sh"]
    assert any(piece.language == "sh" for piece in ours), "README.md shows no command"
    for piece in ours:
        if piece.language != "sh":
            compile(piece.text, f"README.md line {piece.line}", "exec")
        if piece.is_run:
            run_piece(reader, piece)
        elif piece.language == "sh":
            check_without_running(reader, piece)


def test_every_make_target_named_exists() -> None:
    named = {
        word
        for piece in pieces()
        if piece.language == "sh" and re.match(r"make\b", piece.text)
        for word in shlex.split(piece.text, comments=True)[1:]
        if "=" not in word and not word.startswith("-")
    }
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w.-]+)\s*:(?!=)", makefile, re.MULTILINE))
    assert set() < named <= targets


def test_every_file_the_page_links_to_exists() -> None:
    text = re.sub(r"(`{3,}).*?\1", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    missing = [
        link
        for link in links
        if "://" not in link and not link.startswith("mailto:") and not Path(REPOSITORY / link).exists()
    ]
    assert missing == []


def test_an_answer_on_the_page_is_held_to_its_words_and_figures() -> None:
    output = "A step takes\n  78.0 ms (95 % interval), n = 10."
    assert says(output, "takes 77.0 ms (95 % interval)")
    assert not says(output, "takes 70.0 ms (95 % interval)")
    assert not says(output, "took 78.0 ms")
    assert says(output, "")
