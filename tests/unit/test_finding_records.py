from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.runs import make_run

from steplab.errors import UserError
from steplab.lab.choosing import find_records, records_to_report
from steplab.specs.study import study_from_grids
from steplab.store.database import Store

RUN = make_run({"model": "tiny", "context": 32})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with Store.open(path, write=True) as store:
        study = store.begin_study(study_from_grids("nightly", "", [{"model": ["tiny"], "context": [32]}]))
        store.begin_study(study_from_grids("nightly", "", [{"model": ["tiny"], "context": [64]}]))  # without a record
        store.add(replace(RUN, id="a" * 12, name="cell", study=study))
        store.add(replace(RUN, id="b" * 12, name="nightly", created_utc="2026-11-22T07:30:00Z"))
        store.add(replace(RUN, id="c" * 12, name="aaaa"))
        store.add(replace(RUN, id="d" * 12, name="alone"))
        store.add(replace(RUN, id="e" * 12, name="a" * 12))
    return path


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("last", "b"),  # the newest, of whatever name
        ("aaaa", "c"),  # a name before the beginning of an id
        ("aaa", "a"),
        ("aaaaaaaaaaaa", "a"),  # a whole id before a name
        ("nightly", "a"),  # a study before a name
        ("alone", "d"),
    ],
)
def test_a_text_stands_for_the_same_records_everywhere(path: Path, text: str, id: str) -> None:
    for found in (find_records(text, store=path).records, records_to_report([text], store=path).records):
        assert [record.id for record in found] == [id * 12]


def test_a_study_without_records_is_told_as_that(path: Path) -> None:
    with Store.open(path, write=True) as store:
        study = store.begin_study(study_from_grids("begun", "", [{"model": ["tiny"]}]))
    for text in ("begun", study):
        for find in (
            partial(find_records, text),
            partial(records_to_report, [text]),
            partial(records_to_report, study=text),
        ):
            with pytest.raises(UserError, match=f"study '{text}' has no record in .* --resume"):
                find(store=path)
