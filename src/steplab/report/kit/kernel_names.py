import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from steplab.printing import plain
from steplab.report.kit.grouping import grouped
from steplab.report.kit.labels import cut

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


def short_kernels(names: Iterable[str], most: int = 60) -> dict[str, str]:
    """Shorten kernel names to at most `most` characters; different kernels stay different.

    Kernels with equal short names show their differing part, or a number.
    """
    chosen = {name: short_kernel(name, most) for name in names}
    for alike in grouped(chosen, chosen.__getitem__).values():
        if len(alike) > 1:
            chosen |= zip(alike, _differing(alike, most), strict=True)
    used: set[str] = set()
    for name, text in chosen.items():
        number, mark = 1, ""
        while (told := cut(text, most - len(mark)) + mark) in used:
            number += 1
            mark = f" #{number}"
        used.add(told)
        chosen[name] = told
    return chosen


def _differing(names: Sequence[str], most: int) -> list[str]:
    texts = [_readable(name) for name in names]
    if len(set(texts)) < len(texts):  # they differ in parameters or namespaces
        texts = [plain(name[:_LONGEST]) for name in names]
    start = _num_shared(texts)
    while start and texts[0][start - 1].isalnum():  # from the beginning of a word
        start -= 1
    end = _num_shared([text[start:][::-1] for text in texts])
    return [_around(text, start, len(text) - end, most) for text in texts]


def _num_shared(texts: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False)))


def _around(text: str, start: int, end: int, most: int) -> str:
    room = most - (end - start) - 2
    if len(text) <= most:
        return text
    if room < 0:
        called = cut(_readable(text).partition("<")[0], most // 2)
        return f"{called}…{cut(text[start:end], most - len(called) - 1)}"
    before = min(start, max(room // 2, room - (len(text) - end)))
    after = min(len(text) - end, room - before)
    head = text[:start] if before == start else f"{text[:before]}…"
    return head + text[start:end] + (text[end:] if after == len(text) - end else f"…{text[len(text) - after :]}")


def short_kernel(name: str, most: int = 60) -> str:
    """Kernel name without return type, namespaces and parameters, at most `most` characters long.

    A longer name loses numeric template arguments, then plain types, then its middle: kernels of one template mostly
    differ at the end.
    """
    text = _readable(name)
    for rule in (_NUMBERS, _PLAIN_TYPES):
        if len(text) > most:
            text = rule.sub("", text).replace("<>", "").replace(",>", ">")
    return cut(text, most)


def _readable(name: str) -> str:
    name = plain(name[:_LONGEST])
    if re.fullmatch(r"[\w:]+", name):  # aten::mm, nvjet_hsh_128x256: nothing to take off
        return name
    text = _ENABLE_IF.sub("", name.removeprefix("void ")).replace("(anonymous namespace)::", "")
    before = None
    while text != before:  # parameters nest: the innermost pair of brackets first
        before, text = text, _INNERMOST.sub("", text)
    text = _NAMESPACE.sub("", _CLOSURE.sub("", text))
    text = re.sub(r"\s+const\b|(?<=[<,])\s+|\s+(?=[>,])", "", text)
    text = " ".join(text.split()).rstrip(" <(") or name
    wrapped = _WRAPPED.fullmatch(text)
    return wrapped[1] if wrapped else text


def last_part(range: str) -> str:
    """Last name of a range: blocks.*.attention.scores -> scores, blocks.* -> blocks; '' for an empty range."""
    return plain(range).removesuffix(".*").rpartition(".")[2]
