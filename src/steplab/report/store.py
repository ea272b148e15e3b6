"""The report of the condition of a store."""

import dataclasses

from steplab.records.store_condition import StoreCondition
from steplab.report.kit.document import Column, Document, Pairs, Section, Table, Verdict, row_of
from steplab.units import counted, format_bytes


def condition_document(condition: StoreCondition) -> Document:
    """What is in the store, what is damaged, and how to repair it."""
    unreadable = Table(
        name="unreadable",
        columns=(
            Column(key="id"),
            Column(key="kind"),
            Column(key="created_utc", header="time"),
            Column(key="why", header="why it cannot be read", wraps_from=20),
        ),
        rows=tuple(dataclasses.asdict(record) for record in condition.unreadable),
    )
    fields = ("path", "format", "size_bytes", "free_bytes", "journal", "file_system", "num_records", "num_studies")
    facts = row_of(condition, *fields, "num_outdated", "has_unreachable")
    store = facts | {"num_unreadable": len(condition.unreadable), "num_damaged": len(condition.damage)}
    return Document(
        title=f"Store {condition.path}",
        verdict=_verdict(condition),
        sections=(
            Section.of("", Pairs(pairs=tuple(_pairs(condition).items()))),
            Section.of("Records that cannot be read", unreadable),
            Section.notes(condition.damage, "What SQLite finds"),
        ),
        data={"store": [store], "unreadable": unreadable.rows},
    )


def _verdict(condition: StoreCondition) -> Verdict:
    if condition.is_sound:
        return Verdict(sentences=("The store is sound.",))
    found = []
    if condition.damage:
        found.append("its file is damaged")
    if condition.unreadable:
        found.append(f"{counted(len(condition.unreadable), 'record')} cannot be read")
    if condition.has_unreachable:
        found.append("parts of it where records may have been cannot be read")
    what = f"The store is damaged: {', '.join(found)}."
    return Verdict(sentences=(what, "`steplab store repair` copies it and builds it anew of what can be read."))


def _pairs(condition: StoreCondition) -> dict[str, str]:
    outdated = f"{counted(condition.num_outdated, 'record')} whose row in lists is of an earlier version, or damaged"
    how = {"wal": "write-ahead log", "delete": "rollback journal"}.get(condition.journal, condition.journal)
    where = f", on a network file system ({condition.file_system})" if condition.file_system else ""
    studies = "1 study" if condition.num_studies == 1 else f"{condition.num_studies} studies"
    free = f", of which {format_bytes(condition.free_bytes)} are free" if condition.free_bytes else ""
    pairs = {
        "records": f"{counted(condition.num_records, 'record')}, {studies}",
        "size": format_bytes(condition.size_bytes) + free,
        "format": str(condition.format),
        "journal": f"{how}{where}",
    }
    return pairs | ({"to renew": f"{outdated}; `steplab store repair` renews them"} if condition.num_outdated else {})
