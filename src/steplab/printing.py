"""Makes outside text safe to print: every output passes `leaving` or `plain`.

Terminals obey escape sequences, and editors reorder lines by writing-direction marks; records, traces, snapshots and
file names may hold both. `leaving` serves outputs of any format; `plain` serves errors, remarks and text in columns.
"""

import os
import re
import sys

_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff"
"""Body of a character class: C0 controls without tab and line feed, DEL, C1 controls, writing-direction marks, line and
paragraph separators, annotation marks and surrogate halves.
"""
MARK = "written by steplab"
"""Text near the beginning of files that steplab wrote; such files may be overwritten (lab.files)."""
_LONGEST = 1500
"""Longest message in characters; a message may quote a whole argument or line."""
_JSON = ("json", "jsonl")
"""Output formats that are JSON, where control characters become JSON escapes."""
STEERING = re.compile(f"[\n{_STEERING}]")
"""Matches a line feed or a character of `_STEERING`, which one-line text must not contain."""
_CONTROL = re.compile(f"[{_STEERING}]")
_SEQUENCE = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\\\|\x9c)")
"""Matches escape sequences of terminals: control sequences (colours, cursor) and commands (title). No match contains
the beginning of another, so the search takes linear time.
"""
_COLORED = re.compile(f"(\x1b\\[(?:0|1|2|31|32|36)m)|{_SEQUENCE.pattern}|{_CONTROL.pattern}")


def leaving(text: str, format: str, *, colored: bool = False) -> str:
    """`text` safe to print in this output format: in JSON, control characters become JSON escapes. `colored` keeps the
    escape sequences of steplab's colours, bold and dim."""
    if format in _JSON:
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    if colored:
        return _COLORED.sub(lambda found: found[1] or (_written(found) if len(found[0]) == 1 else ""), text)
    return plain(text)


def remark(text: str) -> str:
    """`plain(text)`, shortened in the middle if longer than 1500 characters."""
    text = plain(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 300]} … {text[-300:]}"


def text_of(value: object) -> str:
    """str(value), or the class name if str() fails, as for a very long int."""
    try:
        return str(value)
    except Exception:
        return type(value).__name__


def say(text: str) -> None:
    """Print a message on stderr, made safe by `remark`.

    A failed write raises nothing: the reader may be gone (`2>&1 | head -1`) or the disk full.
    """
    try:
        print(remark(text), file=sys.stderr, flush=True)
    except OSError:
        # The buffer's rest would fail again at Python's exit, with another exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def plain(text: str) -> str:
    r"""`text` without escape sequences and with other control characters spelled out: \x07, \u202e."""
    if text.isprintable():
        return text
    return _CONTROL.sub(_written, _SEQUENCE.sub("", text))


def approximated(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handler for `codecs.register_error`: steplab's non-ASCII signs become one ASCII character each, so columns stay
    aligned, and others Python's escapes.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(char) or char.encode("ascii", "backslashreplace").decode() for char in text), error.end


_IN_ASCII = dict(zip("─–−×·…µ≈■→", "---x|.u~#>", strict=True))


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
