"""Messages, help and the README avoid the phrases that make readers stumble."""

import ast
import re
from collections.abc import Iterator

from tests.cli.program import REPOSITORY

HARD = re.compile(
    r"\b(?:is|are|was|were|be) (?:told|said)\b"
    r"|\b(?:that|those) of\b|\bthose (?:in|which|by|with|for|from|at|without|beside)\b"
    r"|\b(?:one|all) that\b|\b(?:of|by|behind|beside|under|over|against) which\b|\b(?:of|by|from|for|than) what\b"
    r"|\bbesides?\b|\basked (?:for|of|what)\b|\blet go\b|\bgiven up\b",
    re.IGNORECASE,
)
UNCLEAR_START = re.compile(r"(?:^|[.:;] )(?:What|That of|Those of|Of)\b(?![^.?]*\?| course)")
SOURCES = sorted((REPOSITORY / "src" / "steplab").rglob("*.py"))


def texts(tree: ast.AST) -> Iterator[str]:
    seen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            seen.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            seen.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in seen:
            yield node.value


def unclear(text: str) -> list[str]:
    return [found[0] for rule in (HARD, UNCLEAR_START) for found in rule.finditer(text)] if " " in text.strip() else []


def test_messages_and_help_are_plain() -> None:
    found = []
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        command = [ast.get_docstring(tree) or ""] if path.parent.name == "commands" else []
        found += [(path.name, text) for text in (*command, *texts(tree)) if unclear(text)]
    assert not found


def test_the_readme_is_plain() -> None:
    assert not unclear(re.sub(r"(?ms)^```.*?^```$", "", (REPOSITORY / "README.md").read_text(encoding="utf-8")))
