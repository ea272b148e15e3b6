"""Answers questions (specs.question) from records, each with a sentence, a table, bars and the reason."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from steplab.errors import UserError
from steplab.records.record import Record
from steplab.records.registry import kind_of
from steplab.records.rows import Row, Scalar
from steplab.report.kit.document import Bar, Bars, Column, Document, Section, Segment, Sentences, Table, Verdict
from steplab.report.kit.quantities import COUNT, LABEL, NUMBER, SHARE, TEXT, TIMES, Quantity, quantity_of, quotient
from steplab.report.kit.text import dotted, reason
from steplab.report.page import subtitle
from steplab.report.questions.rows import SHEETS, WHOLE, Sheet
from steplab.report.report import report_of
from steplab.specs.model import MODEL_SIZES
from steplab.specs.question import Derivation, Expression, Figure, Question, Questions, Where
from steplab.specs.resolve import resolve_step
from steplab.specs.step import FIELDS
from steplab.units import counted

_MOST_BARS = 24
_FOLLOWING = {
    "queries": ("keys",),
    "of": ("line", "allocation_bytes"),
    "pass": ("optimizer", "update", "accumulation", "checkpointing"),
    "way": ("backend", "device"),
    "variant": ("update", "data_parallel", "bucket_size_mb", "layout"),
}
"""By setting, further settings that may differ when it does, because they depend on it."""


def questions_document(
    asked: Questions, records: Sequence[Record], derive: Callable[[Derivation], Document], title: str | None = None
) -> Document:
    """Answer the questions; `derive` computes a question's `derives`, or raises UserError if no record allows it."""
    answers = _Answers(records, derive)
    chapters, data, shown, headlines = [], list[Row](), list[Row](), list[str]()
    for chapter in asked.chapter:
        parts = []
        for question in chapter.question:
            section, answer, grade = answers.of(question)
            parts.append(section)
            data.append({"chapter": chapter.title, "question": question.asks, "answer": answer or None, "grade": grade})
            data[-1]["measure"] = None if answer else question.measure
            told = " ".join(filter(None, (answer or "not measured", answer and question.why)))
            if question.headline and answer:
                headlines.append(answer)
            shown.append({"question": question.asks, "answer": told, "grade": grade, "command": question.measure})
        chapters.append(Section.of(chapter.title, *parts, anchor=re.sub(r"\W+", "-", chapter.title.lower()).strip("-")))
    open_ones = [str(row["question"]) for row in data if row["answer"] is None]
    partly = sum(str(row["grade"]).startswith("partly") for row in data)
    told = f"Answered: {len(data) - len(open_ones)} of {counted(len(data), 'question')}"
    told += f", {partly} of them partly" * (partly > 0) + f", from {counted(len(records), 'record')}."
    quoted = ", ".join(f"“{each}”" for each in open_ones)
    left = (f"Not measured: {quoted if len(open_ones) < 4 else len(open_ones)}.",) if open_ones else ()
    return Document(
        title=title or asked.title,
        subtitle=dotted(*subtitle(records)),
        verdict=Verdict(sentences=(*headlines, told), cautions=left),
        sections=(
            Section.of(
                "Answers",
                Table(name="answers", columns=_ANSWERS, rows=tuple(shown), first=len(shown)),
                anchor="answers",
            ),
            *chapters,
        ),
        data=data,
    )


_ANSWERS = tuple(
    Column(key=key, wraps_from=width)
    for key, width in (("question", 24), ("answer", 32), ("grade", 12), ("command", 16))
)


class _Missing(Exception):
    pass


class _Answers:
    def __init__(self, records: Sequence[Record], derive: Callable[[Derivation], Document]) -> None:
        self._derive = derive
        self._records = sorted(records, key=lambda record: record.created_utc)
        self._sheets: dict[str, Sheet] = {}

    def of(self, question: Question) -> tuple[Section, str, str]:
        """Section, answer (empty if none), and grade: 'done', 'not', or 'partly' with the missing combinations."""
        try:
            blocks, answer, lacking = self._blocks(question)
        except _Missing:
            missing = f"Not measured; run `{question.measure}`." if question.measure else "Not measured."
            why = "" if question.rows_of else question.why
            return Section.of(question.asks, Sentences.of([missing], "warning"), Sentences.of([why], "note")), "", "not"
        grade = f"partly: no {lacking}" if lacking else "done"
        return Section.of(question.asks, answer, *blocks, Sentences.of([question.why], "note")), answer, grade

    def _blocks(self, question: Question) -> tuple[list[Any], str, str]:
        if question.derives:
            return *self._derived(question.derives), ""
        if not question.rows_of:
            if question.answer:
                return [], question.answer, ""
            raise _Missing
        sheet = self._sheet(question.rows_of)
        keys = [question.rows] if isinstance(question.rows, str) else list(question.rows)
        _refuse_unknown(sheet, question, keys)
        view = _View(sheet, [*keys, question.across] if question.across else keys)
        for rows in _alike(sheet, question, keys):
            try:
                figures = {name: view.figure(rows, figure) for name, figure in question.figures.items()}
            except _Missing:
                continue
            table = list(view.blocks(question, rows)) if question.columns else []
            shown = [
                s for record in self._records if record.id in _most(rows) for s in _sections(record, question.shows)
            ]
            return [*table, *shown], _filled(question.answer, figures), _lacking(rows, question.complete)
        raise _Missing

    def _derived(self, asked: Derivation) -> tuple[list[Any], str]:
        try:
            found = self._derive(asked)
        except UserError as error:
            if asked.model:
                raise
            raise _Missing from error
        return [block for section in found.sections for block in section.blocks], " ".join(found.verdict.sentences)

    def _sheet(self, name: str) -> Sheet:
        if name not in SHEETS:
            raise UserError(f"questions ask for rows of '{name}'; choose one of {', '.join(SHEETS)}")
        if name not in self._sheets:
            self._sheets[name] = SHEETS[name](self._records)
            self._sheets[name].rows.sort(key=lambda row: not row.get("warnings"))  # doubtful first: the last counts
        return self._sheets[name]


def _most(rows: Sequence[Row]) -> set[Scalar]:
    """Ids of the records whose sections are shown: for each pass, the one with most rows, the newest of several."""
    ids: dict[Scalar, list[Scalar]] = {}
    for row in rows:
        ids.setdefault(row.get("pass"), []).insert(0, row["id"])
    return {max(some, key=some.count) for some in ids.values()}


def _sections(record: Record, titles: Sequence[str]) -> Iterator[Section]:
    if not titles:
        return
    found: list[Any] = list(report_of(kind_of(record).name).documents([record])[0].sections)
    for section in found:
        if section.title in titles:
            yield section
        else:
            found += [block for block in section.blocks if isinstance(block, Section)]


def _refuse_unknown(sheet: Sheet, question: Question, keys: Sequence[str]) -> None:
    known = {key for row in sheet.rows for key in row} | set(sheet.settings)
    expressions = [*question.columns, *question.figures.values()]
    named = [*keys, question.across, question.order, *question.where]
    named += [name for each in expressions for name in (each.value, each.over, *each.against)]
    named += [name for figure in question.figures.values() for name in (figure.along, *figure.where)]
    for name in filter(None, named):
        if sheet.rows and name not in known:
            listed = ", ".join(sorted(known))
            raise UserError(f"the question '{question.asks}' names '{name}'; {question.rows_of} have {listed}")


def _alike(sheet: Sheet, question: Question, keys: Sequence[str]) -> list[list[Row]]:
    """Groups rows that agree in every setting the table does not vary, largest group first, then newest."""
    expressions = [*question.columns, *question.figures.values()]
    varied = {*keys, question.across, *(key for each in expressions for key in each.against)}
    varied |= {key for figure in question.figures.values() for key in (figure.along, *figure.where)}
    varied |= {key for key, wanted in question.where.items() if isinstance(wanted, list)}
    varied |= {key for name in varied & _FOLLOWING.keys() for key in _FOLLOWING[name]}
    if "model" in varied:
        varied |= {key for key in sheet.settings if key.startswith("model.")}
    groups: dict[tuple[Scalar, ...], dict[tuple[Scalar, ...], Row]] = {}
    for row in sheet.rows:
        if _fits(row, question.where):
            group = groups.setdefault(tuple(row.get(key) for key in sheet.settings if key not in varied), {})
            group[tuple(row.get(key) for key in sheet.settings if key in varied)] = row
    newest_first = [list(group.values()) for group in groups.values()][::-1]
    return sorted(newest_first, key=len, reverse=True)


@dataclass(frozen=True, slots=True)
class _View:
    sheet: Sheet
    keys: Sequence[str]
    """Settings that identify a row."""

    def value(self, row: Row, expression: Expression) -> Scalar:
        if not expression.is_quotient:
            return row.get(expression.value)
        under = row
        if expression.against:
            moving = {key for name in expression.against for key in _FOLLOWING.get(name, ())}
            wanted = {key: row.get(key) for key in self.sheet.settings if key not in moving} | dict(expression.against)
            alike = [other for other in self.sheet.rows if all(other.get(key) == wanted[key] for key in wanted)]
            if not alike:
                return None
            under = alike[-1]
        return quotient(row.get(expression.value), under.get(expression.over or expression.value))

    def figure(self, rows: Sequence[Row], figure: Figure) -> dict[str, str]:
        fitting = [row for row in rows if _fits(row, figure.where)]
        found = [(value, row) for row in fitting if (value := self.value(row, figure)) is not None]
        if not found:
            raise _Missing
        show = _quantity(figure).show
        numbers = [(float(value), row) for value, row in found if isinstance(value, (int, float))]
        if not numbers:
            return {"": ", ".join(dict.fromkeys(str(value) for value, _ in found))}
        if figure.take == "a_doubling":
            return {"": _a_doubling(numbers, figure.along, self._rest(figure.along))}
        values = [value for value, _ in numbers]
        if figure.take == "median":
            return {"": show(median(values))}
        low, high = min(numbers, key=lambda pair: pair[0]), max(numbers, key=lambda pair: pair[0])
        if figure.take == "range":
            ends = dict.fromkeys((show(low[0]), show(high[0])))
            return {"": " to ".join(ends), "low.at": self._called(low[1]), "high.at": self._called(high[1])}
        end = low if figure.take == "min" else high
        return {"": show(end[0]), "at": self._called(end[1])}

    def _rest(self, along: str) -> Callable[[Row], tuple[Scalar, ...]]:
        moving = (along, *_FOLLOWING.get(along, ()))
        return lambda row: tuple(row.get(key) for key in self.sheet.settings if key not in moving)

    def _called(self, row: Row) -> str:
        return ", ".join(_said(key, row.get(key)) for key in self.keys if row.get(key) is not None)

    def blocks(self, question: Question, rows: Sequence[Row]) -> Iterator[Table | Bars]:
        keys = [key for key in self.keys if key != question.across]
        words = [key for key in keys if all(isinstance(row.get(key), str) for row in rows)]
        labels = [Column(key=k, header=k.replace("_", " "), quantity=TEXT if k in words else LABEL) for k in keys]
        made: dict[tuple[Scalar, ...], dict[str, Scalar]] = {}
        first, columns = question.columns[0], dict[str, Column]()
        for row in _ordered(rows, keys, question):
            name = tuple(row.get(key) for key in keys)
            line = made.setdefault(name, dict(zip(keys, name, strict=True)))
            if question.across:
                failed = "OOM" if row.get("status") == "out_of_memory" else "failed"
                found = self.value(row, first) if row.get("status", "ok") == "ok" else failed
                line[f"at {row.get(question.across)}"] = found
                continue
            for number, each in enumerate(question.columns):
                key, quantity = f"column {number}", _quantity(each)
                columns[key] = Column(key=key, header=each.header or _words(each.value), quantity=quantity)
                line.setdefault(key, self.value(row, each))  # rows of one name: the first in order
                if each.interval:
                    columns[f"{key} ends"] = Column(key=f"{key} ends", header="95 % interval", quantity=LABEL)
                    ends = [row.get(f"{each.value.removesuffix('_s')}_{end}_s") for end in ("low", "high")]
                    known = [quantity.show(end) for end in ends if end is not None]
                    line[f"{key} ends"] = " to ".join(dict.fromkeys(known)) or None
        lines = list(made.values())[: question.most or None]
        sizes = sorted({row.get(question.across) for row in rows}, key=_place) if question.across else []
        across = [Column(key=f"at {at}", header=_said(question.across, at), quantity=_quantity(first)) for at in sizes]
        shown = across or list(columns.values())
        yield from _bars(question, keys, lines, shown)
        yield Table(
            name=question.asks, columns=(*labels, *shown), rows=tuple(lines), caption=self._caption(question, rows)
        )

    def _caption(self, question: Question, rows: Sequence[Row]) -> str:
        common = {key: {row.get(key) for row in rows} for key in self.sheet.settings if key not in self.keys}
        shared = [
            _said(key, next(iter(values)))
            for key, values in common.items()
            if len(values) == 1 and values != {None} and not _goes_without_saying(key, *values)
        ]
        ids = dict.fromkeys(str(row["id"]) for row in rows if row.get("id"))
        named = f"Record{'s' if len(ids) > 1 else ''} {', '.join(ids)}." if len(ids) <= 3 else f"{len(ids)} records."
        failed = [row for row in rows if row.get("status", "ok") != "ok"]
        if failed and all(column.value != "failure" for column in question.columns):
            why = (
                f"{self._called(row)} ({reason(str(row['status']), str(row.get('failure') or ''), 50)})"
                for row in failed
            )
            named += f" Failed: {'; '.join(why)}."
        timed = any(column.value.endswith("_s") for column in question.columns)
        if timed and (doubtful := [f"{self._called(row)} ({row['warnings']})" for row in rows if row.get("warnings")]):
            named += (
                f" Doubtful times: {'; '.join(doubtful[:3])}{f' and {len(doubtful) - 3} more' * (len(doubtful) > 3)}."
            )
        return f"{' · '.join(shared)}. {named}" if shared else named


def _goes_without_saying(key: str, value: Scalar) -> bool:
    if key in ("model", "batch", "context", "pass", "precision"):
        return False
    field = next((field for field in FIELDS.values() if field.column == key), None)
    return key.startswith("model.") or (field is not None and value == field.value(_DEFAULT)) or key in _UNSAID


_DEFAULT = resolve_step({})
_UNSAID = ("kv_heads", "keys", "status", "line", "of", "allocation_bytes", "device_kind")


def _bars(
    question: Question, keys: Sequence[str], lines: Sequence[Mapping[str, Scalar]], shown: Sequence[Column]
) -> Iterator[Bars]:
    drawn = [column for column in shown if question.across or column.key == _drawn_key(question)]
    bars = [
        Bar(
            label=" · ".join([_said(key, line[key]) for key in keys] + ([column.heading] if question.across else [])),
            figure=(figure := column.quantity.show(value)),
            segments=(Segment(value=float(value), color=number % 8 + 1, tip=figure),),
        )
        for line in lines
        for number, column in enumerate(drawn)
        if isinstance(value := line.get(column.key), (int, float)) and value > 0
    ]
    if 1 < len(bars) <= _MOST_BARS:
        names = tuple((number % 8 + 1, "■", column.heading) for number, column in enumerate(drawn))
        several = len(drawn) > 1
        yield Bars(bars=tuple(bars), legend=names if several else (), note="" if several else f"Bars: {names[0][2]}.")


def _drawn_key(question: Question) -> str:
    told = [question.figures[name] for name in re.findall(r"\{(\w+)", question.answer) if name in question.figures]
    columns = [(each.value, each.over, each.against) for each in question.columns]
    places = [columns.index(key) for each in told if (key := (each.value, each.over, each.against)) in columns]
    return f"column {places[0] if places else 0}"


def _filled(answer: str, figures: Mapping[str, Mapping[str, str]]) -> str:
    def put(found: re.Match[str]) -> str:
        name, _, part = found[1].partition(".")
        if name not in figures or part not in figures[name]:
            known = ", ".join(f"{{{each}{'.' if part else ''}{part}}}" for each in figures for part in figures[each])
            raise UserError(f"an answer names {found[0]}; the figures of its question are {known}")
        return figures[name][part]

    return re.sub(r"\{([\w.]+)\}", put, answer)


def _fits(row: Row, where: Where) -> bool:
    return all(row.get(key) in (wanted if isinstance(wanted, list) else [wanted]) for key, wanted in where.items())


def _lacking(rows: Sequence[Row], complete: Where) -> str:
    values = [wanted if isinstance(wanted, list) else [wanted] for wanted in complete.values()]
    held = {tuple(row.get(key) for key in complete) for row in rows if row.get("status", "ok") == "ok"}
    lacking: dict[str, list[str]] = {}
    for each in product(*values):
        if each and each not in held:
            *where, last = (_said(key, value) for key, value in zip(complete, each, strict=True))
            lacking.setdefault(", ".join(where), []).append(last)
    return "; ".join(f"{where}: {', '.join(lasts)}".removeprefix(": ") for where, lasts in lacking.items())


def _words(field: str) -> str:
    return (f"{field[:-6]}/s" if field.endswith("_per_s") else field.removesuffix("_s")).replace("_", " ")


def _quantity(expression: Expression) -> Quantity:
    if expression.share:
        return SHARE
    if expression.is_quotient:
        return TIMES
    found = quantity_of(expression.value)
    return _AS_IT_IS if found is TEXT else found


_AS_IT_IS = Quantity(
    lambda value: value if isinstance(value, str) else COUNT.write(value) if value >= 1e6 else NUMBER.write(value)
)


def _said(key: str, value: Scalar) -> str:
    words = key.replace("_", " ")
    if isinstance(value, (int, float)):
        return f"{value / 1e6:,.6g} MB" if key.endswith("_bytes") else f"{words} {value:.10g}"
    return f"{words} {value}" if value in ("yes", "no", "off", "none", "after") else str(value)


_ORDER = (*MODEL_SIZES, "fp32", "forward", "forward_backward", "backward", "train", "optimizer", WHOLE)


def _place(value: Scalar) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return (1, _ORDER.index(value), "") if value in _ORDER else (2, 0.0, str(value))


def _ordered(rows: Sequence[Row], keys: Sequence[str], question: Question) -> list[Row]:
    if question.order:
        return sorted(rows, key=lambda row: -float(row.get(question.order) or 0.0))
    return sorted(rows, key=lambda row: [_place(row.get(key)) for key in keys])


def _a_doubling(numbers: Sequence[tuple[float, Row]], along: str, rest: Callable[[Row], tuple[Scalar, ...]]) -> str:
    alike: dict[tuple[Scalar, ...], dict[float, float]] = {}
    for value, row in numbers:
        if isinstance(at := row.get(along), (int, float)):
            alike.setdefault(rest(row), {})[float(at)] = value
    growths = [[some[2 * at] / some[at] for at in some if 2 * at in some and some[at]] for some in alike.values()]
    factors = [factor for growth in growths for factor in growth]
    if not factors:
        raise _Missing
    pooled = sum(map(bool, growths))
    return f"{median(factors):.1f}×{f' (the median of {pooled} series)' if pooled > 1 else ''}"
