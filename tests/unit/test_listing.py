import dataclasses
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.ddp_records import make_ddp_run
from tests.rendering import run_text
from tests.runs import make_run, recorder_run
from tests.stored_lines import fill, import_lines
from tests.sure import sure

from steplab.errors import SteplabError, UserError
from steplab.lab.keeping import note, tag
from steplab.lab.listing import checked_keys, list_records
from steplab.records.codec import decode, encode
from steplab.records.run import Run
from steplab.report.kit.rendering import render
from steplab.report.run.columns import list_document
from steplab.specs.study import StudySpec, labels
from steplab.store.database import Store

RUNS = [
    make_run({"model": model, "precision": precision}, id=f"{number:012x}", created_utc=f"2026-11-2{number}T07:30:00Z")
    for number, (model, precision) in enumerate(
        [("small", "fp32"), ("small", "bf16"), ("medium", "bf16"), ("small", "bf16")], start=1
    )
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fill(
        tmp_path / "store.db",
        *(
            *RUNS,
            recorder_run(created_utc="2026-11-20T00:00:00Z"),
            dataclasses.replace(make_ddp_run(), created_utc="2026-11-20T12:00:00Z"),
        ),
    )
    return tmp_path / "store.db"


def ids(path: Path, **asked: Any) -> list[str]:
    return [str(row["id"]) for row in list_records(store=path, **asked).rows]


def step_s(run: Run) -> float:
    step = sure(sure(run.timing).phase("step"))
    return median(step.best_s)


# --- which records ----------------------------------------------------------------------------------------


def test_records_of_all_kinds_are_listed_newest_first(path: Path) -> None:
    rows = list_records(store=path).rows
    assert [row["kind"] for row in rows] == ["run", "run", "run", "run", "ddp", "loop"]
    assert [row["created_utc"] for row in rows] == sorted((str(row["created_utc"]) for row in rows), reverse=True)


def test_kinds(path: Path) -> None:
    assert len(ids(path, kinds=("loop", "ddp"))) == 2
    with pytest.raises(UserError, match="choose one of run, profile"):
        ids(path, kinds=("runs",))


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("model=small", [4, 2, 1]),
        ("model=small and precision=bf16", [4, 2]),
        ("model = small , precision != bf16", [1]),
        ("context >= 128", [4, 3, 2, 1]),
        ("context>128", []),
        ("name=nobody", []),
        ("device~h200 and model=medium", [3]),
        ("peak-allocated-bytes<1MiB", []),
        ("peak_allocated_bytes<0.0001GiB", []),
        ("step_time_s<1h and precision=fp32", [1]),
        ("pass='train' and model=medium", [3]),
    ],
)
def test_conditions(path: Path, where: str, numbers: list[int]) -> None:
    assert ids(path, kinds=("run",), where=where) == [RUNS[number - 1].id for number in numbers]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"where": "modell=small"}, "did you mean model?"),
        ({"where": "model"}, "is not a condition"),
        ({"where": "context>="}, "'context>=' is not a condition"),
        ({"where": "context=="}, "'context==' is not a condition"),
        ({"where": "model=tiny and"}, "'model=tiny and' lacks a condition"),
        ({"where": "model=tiny,"}, "'model=tiny,' lacks a condition"),
        ({"where": "and model=tiny"}, "'and model=tiny' is not a condition"),
        ({"where": "context<wide"}, "context is compared with a number"),
        ({"sort": "model:up"}, "--sort takes"),
        ({"sort": "speed"}, "no field 'speed'"),
        ({"kinds": ("study", "run")}, "by themselves"),
    ],
)
def test_what_is_not_valid_is_refused_with_what_is(path: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        list_records(store=path, **asked)


def test_since_a_day(path: Path) -> None:
    assert ids(path, where="created_utc>=2026-11-23") == [RUNS[3].id, RUNS[2].id]


def test_sorted_by_any_field_those_without_it_last(path: Path) -> None:
    kinds = ("run", "ddp")
    newest_first = [RUNS[3], RUNS[2], RUNS[1], RUNS[0]]
    expected = [run.id for run in sorted(newest_first, key=step_s)]
    *sorted_ids, last = ids(path, kinds=kinds, sort="step_time_s")
    assert sorted_ids == expected
    *falling, still_last = list_records(store=path, kinds=kinds, sort="step_time_s:desc").rows
    assert [row["step_time_s"] for row in falling] == sorted(map(step_s, RUNS), reverse=True)
    assert still_last["id"] == last


def test_what_is_beyond_the_limit_is_known(path: Path) -> None:
    found = list_records(store=path, limit=2)
    assert len(found.rows) == 2
    assert found.num_left_out > 0
    assert list_records(store=path, limit=6).num_left_out == 0
    assert list_records(store=path, kinds=("run",), limit=2).num_left_out == 2


# --- what is shown ----------------------------------------------------------------------------------------


def test_a_list_has_the_fields_that_differ_and_says_once_what_is_shared(path: Path) -> None:
    text = render(list_document(list_records(store=path, kinds=("run",)).rows), "table", width=80)
    header, *_ = text.splitlines()
    assert header.split()[:3] == ["id", "UTC", "kind"]
    rows = [line for line in text.splitlines() if line[:12] in {run.id for run in RUNS}]
    assert all("small" in row or "medium" in row for row in rows)
    assert all("context" not in row for row in rows)
    caption = " ".join(text.splitlines()[-6:])
    for shared in ("NVIDIA H200", "context 128", "batch 4", "commit 1a2b3c4+"):
        assert shared in caption


def test_an_imported_trace_says_what_it_is(path: Path) -> None:
    text = render(list_document(list_records(store=path).rows), "table", width=80)
    lines = text.splitlines()
    (loop,) = [index for index, line in enumerate(lines) if " loop " in line]
    assert "my finetuning" in lines[loop + 1], "what it is stands below its figures"


def test_columns_are_those_asked_for(path: Path) -> None:
    rows = list_records(store=path, kinds=("run",)).rows
    document = list_document(rows, checked_keys("id,git-commit,precision", rows))
    assert list(json.loads(render(document, "json"))[0]) == ["id", "git_commit", "precision"]
    assert render(document, "table", width=80).splitlines()[0].split() == ["id", "commit", "precision"]
    with pytest.raises(UserError, match="did you mean precision"):
        checked_keys("precison", rows)


def test_cells_of_a_study_are_named_by_what_tells_them_apart() -> None:
    specs = [run.spec for run in RUNS[:3] if run.spec]
    assert labels(specs) == ["small · fp32", "small · bf16", "medium · bf16"]
    assert labels(specs[:1]) == ["small"]


# --- ids --------------------------------------------------------------------------------------------------


def test_last_is_the_newest_record_and_the_newest_study(path: Path) -> None:
    assert RUNS[0].spec
    study = StudySpec(name="twice", description="", cells=(RUNS[0].spec,))
    with Store.open(path, write=True) as store:
        assert store.get("last") == RUNS[3]
        with pytest.raises(UserError, match="no study in"):
            store.study_id("last")
        store.begin_study(study)
        newest = store.begin_study(study)
        assert store.study_id("last") == store.study_id("twice") == newest


# --- what users add ---------------------------------------------------------------------------------------


def test_tags_and_notes_are_part_of_the_record_and_found_in_lists(path: Path) -> None:
    tag(RUNS[0].id, ("baseline", "paper"), store=path)
    tag(RUNS[0].id, ("quiet", "baseline"), remove=("paper",), store=path)
    note(RUNS[0].id, "fan was off", store=path)
    with Store.open(path, write=False) as store:
        found = store.get(RUNS[0].id)
    assert found == dataclasses.replace(RUNS[0], tags=("baseline", "quiet"), comment="fan was off")
    assert decode(encode(found)) == found
    (row,) = list_records(store=path, where="tags~quiet").rows
    assert (row["id"], row["tags"], row["comment"]) == (RUNS[0].id, "baseline quiet", "fan was off")
    text = render(list_document(list_records(store=path).rows), "table", width=120)
    assert "fan was off" in text
    assert "tags baseline quiet" in text


def test_fields_of_a_later_version_outlive_a_tag(path: Path) -> None:
    body = json.loads(encode(dataclasses.replace(RUNS[0], id="later"))) | {"of_later": [1, 2.5, "x"]}
    with Store.open(path, write=True) as store:
        import_lines(store, [json.dumps(body).encode()])
    tag("later", ("old",), store=path)
    with Store.open(path, write=False) as store:
        ((stored,),) = store._connection.query("SELECT body FROM record WHERE id = 'later'")
    assert json.loads(stored) == body | {"tags": ["old"], "comment": ""}


def test_a_record_that_comes_back_is_the_same_whatever_was_added_to_it(path: Path) -> None:
    tag(RUNS[0].id, ("mine",), store=path)
    with Store.open(path, write=True) as store:
        assert import_lines(store, [encode(RUNS[0])]) == (0, 1)
        assert store.get(RUNS[0].id).tags == ("mine",)
        with pytest.raises(SteplabError, match="a different record"):
            import_lines(store, [encode(dataclasses.replace(RUNS[0], tokens_per_step=1))])


@pytest.mark.parametrize("word", ["", "two words", "a,b", "\x1b[2J"])
def test_a_tag_is_one_printable_word(path: Path, word: str) -> None:
    with pytest.raises(UserError, match="a tag is one printable word"):
        tag(RUNS[0].id, (word,), store=path)


def test_a_tag_that_is_not_there_cannot_be_removed(path: Path) -> None:
    with pytest.raises(UserError, match="has no tag 'gone'; it has none"):
        tag(RUNS[0].id, remove=("gone",), store=path)
    with pytest.raises(UserError, match="a note must be one line"):
        note(RUNS[0].id, "two\nlines", store=path)


def test_a_run_without_annotations_says_nothing_of_them() -> None:
    assert "Tags" not in run_text(RUNS[0])


def test_words_for_a_record_make_no_store(tmp_path: Path) -> None:
    absent = tmp_path / "absent.db"
    with pytest.raises(SteplabError, match="no store at"):
        tag("last", ["x"], store=absent)
    with pytest.raises(SteplabError, match="no store at"):
        note("last", "x", store=absent)
    assert not absent.exists()
