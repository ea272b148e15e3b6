"""Text from outside without what steers its reader: whatever leaves goes through `leaving` or `plain`.

Records, traces, snapshots and names of files may hold escape sequences, which a terminal would obey, marks of writing
direction, which turn a line around in an editor, and other control characters. `leaving` stands where text leaves, the
command line's output (`cli.output`) and Python's views (`views.view`), whatever the format; `plain` where errors and
remarks are printed, and where texts are fitted into columns.
"""

import os
import re
import sys

_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff"
"""Control characters (C0 without tab and line feed, DEL, C1), marks of writing direction, line and paragraph
separators, marks of annotations, and halves of surrogate pairs, in the syntax of a regular expression's set."""
MARK = "written by steplab"
"""The mark of a file that steplab wrote, near its beginning. It may be replaced (lab.files)."""
_LONGEST = 1500
"""Characters of an error or a remark: one may quote a whole argument or a line of a file."""
_JSON = ("json", "jsonl", "perfetto")
"""The formats that are JSON, in which control characters are written as JSON's escapes."""
STEERING = re.compile(f"[\n{_STEERING}]")
"""Characters that no text of one line has."""
_CONTROL = re.compile(f"[{_STEERING}]")
_SEQUENCE = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\\\|\x9c)")
"""Escape sequences that terminals obey: control sequences (colours, the cursor) and commands (setting the title). None
holds the beginning of another, so that a text of beginnings alone is read once and not once for each."""
_COLORED = re.compile(f"(\x1b\\[(?:0|1|2|31|32|36)m)|{_SEQUENCE.pattern}|{_CONTROL.pattern}")


def leaving(text: str, format: str, *, colored: bool = False) -> str:
    """The text of an output of this format as it may leave; `colored`: with steplab's own colours."""
    if format in _JSON:
        return plain_json(text)
    return plain_with_colors(text) if colored else plain(text)


def remark(text: str) -> str:
    """The text of an error or a remark as it is printed: plain, and its middle left out where it is very long."""
    text = plain(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 300]} … {text[-300:]}"


def text_of(value: object) -> str:
    """The text of anything; of a value that has none (a long int, an object of a user's that fails), its class."""
    try:
        return str(value)
    except Exception:
        return type(value).__name__


def say(text: str) -> None:
    """Print a remark for the user on standard error; it may quote a file, which must not steer the terminal.

    No work ends because its remarks cannot be written: their reader may be gone (`2>&1 | head -1`), the disk of their
    file full.
    """
    try:
        print(remark(text), file=sys.stderr, flush=True)
    except OSError:
        # What is left in the buffer would fail once more when Python ends, with an exit code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def plain(text: str) -> str:
    r"""The text without escape sequences, and with other control characters in writing: \x07, \u202e."""
    if text.isprintable():
        return text
    return _CONTROL.sub(_written, _SEQUENCE.sub("", text))


def plain_with_colors(text: str) -> str:
    """The text as `plain` makes it, but with the colours and weights that steplab itself sets."""
    return _COLORED.sub(lambda found: found[1] or (_written(found) if len(found[0]) == 1 else ""), text)


def plain_json(text: str) -> str:
    """The same JSON, with control characters in its texts as JSON's own escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def approximated(error: UnicodeError) -> tuple[str | bytes, int]:
    """A handler of errors for `codecs.register_error`: what steplab writes of signs beyond ASCII, where an encoding has
    none of them, as an ASCII character each, so that columns stay columns; other characters as Python's escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(char) or char.encode("ascii", "backslashreplace").decode() for char in text), error.end


_IN_ASCII = dict(zip("─–−×·…µ≈■→", "---x|.u~#>", strict=True))


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
