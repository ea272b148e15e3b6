import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.attention_records import make_benchmark
from tests.runs import make_run

from steplab.errors import SteplabError, UserError
from steplab.lab import sweeping
from steplab.lab.choosing import records_to_report
from steplab.lab.keeping import NotStored, Place, keep, open_store
from steplab.lab.sweeping import StudyJob, SweepProgress, jobs_of, sweep
from steplab.records.failure import Failure
from steplab.records.record import Record
from steplab.specs.resolve import resolve_step
from steplab.specs.study import Part, StudySpec
from steplab.store.selection import cell_key, part_key

SPECS = (resolve_step({"context": 32}), resolve_step({"context": 64}))
BENCHMARK = Part(kind="attention", options={"sequence": 64})
STUDY = StudySpec(name="mine", description="a test", cells=SPECS, parts=(BENCHMARK,))


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
        self.store, self.made, self.fails = store, list[str](), dict[str, SteplabError | Failure]()
        self.told: list[SweepProgress] = []
        monkeypatch.setattr(sweeping, "jobs_of", self._jobs)

    def _jobs(self, study: StudySpec) -> list[StudyJob]:
        of_steps = [
            StudyJob(key=cell_key(cell), what=f"context {cell.context}", measure=self._measure(make_run({}, spec=cell)))
            for cell in study.cells
        ]
        benchmarks = [
            StudyJob(key=part_key(part), what=part.kind, measure=self._measure(make_benchmark()))
            for part in study.parts
        ]
        return of_steps + benchmarks

    def _measure(self, record: Any) -> Callable[..., Record]:
        def measure(*, name: str, store: Path, place: Place, **how: Any) -> Record:
            failure = self.fails.get(place.cell)
            if isinstance(failure, SteplabError):
                raise failure
            self.made.append(place.cell)
            number = len(self.made)
            own = {"id": f"{number:012x}", "created_utc": f"2026-11-22T00:00:0{number}Z", "name": name}
            changed = dataclasses.replace(record, **own, failure=failure)
            with open_store(store, write=True) as opened:
                return keep(opened, changed, place)

        return measure

    def run(self, **how: Any) -> sweeping.SweepResult:
        return sweep(STUDY, store=self.store, on_progress=self.told.append, **how)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "store.db")


KEYS = [*map(cell_key, SPECS), part_key(BENCHMARK)]


def test_records_of_all_kinds_belong_to_the_study(machine: Machine) -> None:
    result = machine.run()
    assert machine.made == KEYS
    assert (result.num_measured, result.num_failed, result.refusals) == (3, 0, ())
    assert [run.spec for run in result.runs] == list(SPECS)
    with open_store(machine.store, write=False) as opened:
        assert {record.sweep_id for record in opened.iterate()} == {result.study_id}
        assert [row["kind"] for row in opened.rows(kind=None, study=result.study_id)] == ["attention", "run", "run"]
        (study,) = opened.studies()
    assert (study["num_cells"], study["num_ok"], study["num_failed"]) == (3, 3, 0)


def test_a_resumed_study_makes_what_is_missing_and_what_crashed(machine: Machine) -> None:
    machine.fails = {KEYS[1]: Failure(kind="crashed", message="SIGSEGV"), KEYS[2]: SteplabError("no processes")}
    first = machine.run()
    assert first.num_failed == 2
    assert first.refusals == ("attention: no processes",)
    machine.fails, machine.made = {}, ["", ""]
    second = machine.run(resume=True)
    assert machine.made[2:] == KEYS[1:]
    assert (second.study_id, second.num_failed) == (first.study_id, 0)
    machine.told.clear()
    machine.run(resume=True)
    assert machine.told == []


def test_what_could_not_be_made_stands_in_the_description_until_it_is(machine: Machine) -> None:
    def description() -> object:
        with open_store(machine.store, write=False) as opened:
            (study,) = opened.studies()
        return study["description"]

    machine.fails = {KEYS[2]: UserError("attention needs a GPU")}
    machine.run()
    assert description() == "a test; not measured: attention: attention needs a GPU"
    assert machine.told[-1].refusal == "attention needs a GPU"
    machine.fails = {}
    machine.run(resume=True)
    assert description() == "a test"


def test_a_store_that_takes_no_record_ends_the_study(machine: Machine) -> None:
    machine.fails = {KEYS[0]: NotStored("the disk is full")}
    with pytest.raises(NotStored):
        machine.run()
    assert machine.made == []


def test_progress_says_what_tells_measurements_apart() -> None:
    assert [job.what for job in jobs_of(STUDY)] == ["context 32", "context 64", "attention alone"]
    watched = dataclasses.replace(STUDY, parts=(Part(kind="memory", step=resolve_step({"precision": "bf16"})),))
    assert [job.what for job in jobs_of(watched)] == [
        "context 32 · fp32",
        "context 64 · fp32",
        "memory of context 128 · bf16",
    ]
    assert [job.num_steps for job in jobs_of(STUDY)] == [15, 15, 0]


@pytest.mark.parametrize("part", [Part(kind="comm", options={"sizes": 1}), Part(kind="ddp", options={"model": "huge"})])
def test_options_that_are_not_valid_are_refused_before_anything_is_measured(part: Part) -> None:
    with pytest.raises(UserError, match=r"no option 'sizes'; choose one of|huge"):
        jobs_of(dataclasses.replace(STUDY, parts=(part,)))


def test_a_resumed_study_is_reported_in_the_order_of_its_measurements(machine: Machine) -> None:
    machine.fails = {KEYS[0]: Failure(kind="timeout", message="too long")}
    machine.run()
    machine.fails = {}
    machine.run(resume=True)
    (*first_kinds, last) = records_to_report(study="mine", store=machine.store).records
    assert [record.cell for record in first_kinds] == list(SPECS)
    assert last.cell is None
    assert machine.made == [*KEYS, KEYS[0]]
