"""Removes what could steer the reader of outside text: everything printed passes `leaving` or `plain`.

Records, traces, snapshots and file names may hold escape sequences, which terminals obey, writing-direction marks,
which reorder lines in editors, and other control characters. `leaving` is for outputs of any format (`cli.output`,
`views.view`); `plain` is for errors, remarks and text in columns.
"""

import os
import re
import sys

_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff"
"""Control characters (C0 without tab and line feed, DEL, C1), writing-direction marks, line and paragraph separators,
annotation marks and surrogate halves, as a regular expression's set.
"""
MARK = "written by steplab"
"""Mark near the beginning of steplab's files, which allows replacing them (lab.files)."""
_LONGEST = 1500
"""Most characters of a message, which may quote a whole argument or line."""
_JSON = ("json", "jsonl")
"""Formats that are JSON, where control characters become JSON's escapes."""
STEERING = re.compile(f"[\n{_STEERING}]")
"""Characters absent from one-line text."""
_CONTROL = re.compile(f"[{_STEERING}]")
_SEQUENCE = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\\\|\x9c)")
"""Escape sequences obeyed by terminals: control sequences (colours, cursor) and commands (title). None contains
another's beginning, so repeated beginnings are read once.
"""
_COLORED = re.compile(f"(\x1b\\[(?:0|1|2|31|32|36)m)|{_SEQUENCE.pattern}|{_CONTROL.pattern}")


def leaving(text: str, format: str, *, colored: bool = False) -> str:
    """Safe text of an output in this format; `colored`: with steplab's colours."""
    if format in _JSON:
        return plain_json(text)
    return plain_with_colors(text) if colored else plain(text)


def remark(text: str) -> str:
    """Plain text for a message, shortened in the middle if very long."""
    text = plain(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 300]} … {text[-300:]}"


def text_of(value: object) -> str:
    """str(value); for a value without one (a long int, a failing object), its class."""
    try:
        return str(value)
    except Exception:
        return type(value).__name__


def say(text: str) -> None:
    """Print a message on stderr, unable to steer the terminal.

    Failures to write never end work: the reader may be gone (`2>&1 | head -1`), or the disk full.
    """
    try:
        print(remark(text), file=sys.stderr, flush=True)
    except OSError:
        # The buffer's rest would fail again at Python's exit, with another exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def plain(text: str) -> str:
    r"""Text without escape sequences, other control characters spelled out: \x07, \u202e."""
    if text.isprintable():
        return text
    return _CONTROL.sub(_written, _SEQUENCE.sub("", text))


def plain_with_colors(text: str) -> str:
    """As `plain`, but keeping steplab's colours and weights."""
    return _COLORED.sub(lambda found: found[1] or (_written(found) if len(found[0]) == 1 else ""), text)


def plain_json(text: str) -> str:
    """The same JSON with control characters as JSON's escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def approximated(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler for `codecs.register_error`: steplab's non-ASCII signs become one ASCII character each, so columns
    stay aligned; other characters become Python's escapes.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(char) or char.encode("ascii", "backslashreplace").decode() for char in text), error.end


_IN_ASCII = dict(zip("─–−×·…µ≈■→", "---x|.u~#>", strict=True))


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
