"""Names of kernels and ranges as people can read them: without what says where, and not what, a kernel is."""

import re

from steplab.report.kit.text import plain

_LONGEST = 4096  # characters looked at; a template can expand to megabytes
_ENABLE_IF = re.compile(r"^(?:std::)?enable_if<.*?>::type\s+")
_NAMESPACE = re.compile(r"\b[A-Za-z_]\w*::")
_INNERMOST = re.compile(r"\([^()]*\)")
_WRAPPED = re.compile(r"Kernel2?<(\w+)>")  # cutlass: the argument is the whole of it
_CLOSURE = re.compile(r"::\s*(?:operator\s*|const\b|\{[^{}]*\}|\s)+|\{lambda[^{}]*\}")
_NUMBERS = re.compile(r"(?<=[<,])(?:-?\d+(?:ul?)?|true|false)(?:,|(?=>))")
_PLAIN_TYPES = re.compile(
    r"(?<=[<,])(?:(?:unsigned )?(?:int|long|char|float|double|bool)\*?|[Aa]rray<[^<>]*>)(?:,|(?=>))"
)


def short_kernel(name: str, most: int = 60) -> str:
    """`name` without return type, namespaces and parameters, in at most `most` characters.

    A name that is still too long loses the numbers among its template's arguments, then the plain types, then its
    middle: what distinguishes two kernels of one template mostly stands at the end.
    """
    name = plain(name[:_LONGEST])
    if re.fullmatch(r"[\w:]+", name):  # aten::mm, nvjet_hsh_128x256: nothing to take off
        return cut(name, most)
    text = _ENABLE_IF.sub("", name.removeprefix("void ")).replace("(anonymous namespace)::", "")
    before = None
    while text != before:  # parameters nest: the innermost pair of brackets first
        before, text = text, _INNERMOST.sub("", text)
    text = _NAMESPACE.sub("", _CLOSURE.sub("", text))
    text = re.sub(r"\s+const\b|(?<=[<,])\s+|\s+(?=[>,])", "", text)
    text = " ".join(text.split()).rstrip(" <(") or name
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1]
    for rule in (_NUMBERS, _PLAIN_TYPES):
        if len(text) > most:
            text = rule.sub("", text).replace("<>", "").replace(",>", ">")
    return cut(text, most)


def last_part(range: str) -> str:
    """The last name of a range: blocks.*.attention.scores -> scores, blocks.* -> blocks; '' for none."""
    return plain(range).removesuffix(".*").rpartition(".")[2]


def cut(text: str, most: int) -> str:
    """The text without its middle, if it is longer than `most` characters."""
    tail = most // 2
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"
