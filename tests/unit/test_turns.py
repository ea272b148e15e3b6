import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import msgspec
import pytest
from tests.runs import make_run
from tests.sure import sure

from steplab.comparison.comparing import compare
from steplab.comparison.turns import step_ratio
from steplab.errors import UserError
from steplab.lab import turns as lab_turns
from steplab.lab.turns import Compared, ab
from steplab.measurement.jobs import StepTask
from steplab.measurement.observer import Observer
from steplab.measurement.processes import turns as processes
from steplab.measurement.processes.conversation import Surroundings
from steplab.measurement.processes.turns import Session
from steplab.measurement.step_job import measure_here
from steplab.records.codec import new_id
from steplab.records.comparison import Side
from steplab.records.failure import Failure
from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing, Turn, Turns
from steplab.report.kit.rendering import render
from steplab.report.turns.document import turns_document
from steplab.specs.resolve import resolve_step
from steplab.store.database import Store

OUT_OF_MEMORY = Failure(kind="out_of_memory", message="8 GiB more were requested")
KILLED = Failure(kind="crashed", message="the process was ended by SIGKILL during measure")


class Device:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **step_s: float) -> None:
        self.step_s = {int(name.removeprefix("context_")): seconds for name, seconds in step_s.items()}
        self.holds = 9
        self.dies: dict[int, int] = {}
        self.loads = True
        self.started: list[Process] = []
        self.present: list[Process] = []
        self.order: list[tuple[int, int]] = []
        monkeypatch.setattr(processes, "Conversation", self.start)
        monkeypatch.setattr(processes, "measure_in_child", self.measure)

    def start(self, request: Any, listener: Any, timeout_s: float | None, **rest: Any) -> "Process":
        self.started.append(Process(self, request, listener))
        return self.started[-1]

    def measure(self, task: StepTask, **rest: Any) -> Run:
        spec = task.spec
        self.order.append((spec.context, spec.steps))
        return self.run(spec, spec.steps)

    def run(self, spec: Any, steps: int) -> Run:
        samples = (self.step_s[spec.context],) * steps
        timing = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", device_s=samples),))
        return make_run(id=new_id(), spec=spec, timing=timing)


class Process:
    def __init__(self, device: Device, request: Any, listener: Any) -> None:
        self.device, self.listener, self.turns = device, listener, list[Turn]()
        self.task: StepTask | None = None
        self.ended = False
        if request is not None:
            self.begin(request, None)

    def begin(self, request: Any, timeout_s: float | None) -> None:
        self.task = msgspec.json.decode(request.task, type=StepTask)

    def listen(self) -> Failure | None:
        if self.task is None:
            self.listener.is_ready = self.device.loads
            return None if self.device.loads else KILLED
        if len(self.device.present) >= self.device.holds:
            return OUT_OF_MEMORY
        self.device.present.append(self)
        self.listener.is_ready = True
        return None

    def give(self, turn: Turn) -> Failure | None:
        assert self.task is not None
        context = self.task.spec.context
        self.turns.append(turn)
        if self.device.dies.get(context) == len(self.turns):
            return KILLED
        self.device.order.append((context, turn.steps))
        run = self.device.run(self.task.spec, sum(each.steps for each in self.turns))
        told = dataclasses.replace(sure(self.task.turns), turns=tuple(self.turns))
        self.listener.measured = dataclasses.replace(run, turns=told)
        return None

    def end(self) -> None:
        self.ended = True
        if self in self.device.present:
            self.device.present.remove(self)


def specs(*contexts: int) -> list[Any]:
    return [resolve_step({"model": "tiny", "context": context, "steps": 30}) for context in contexts]


def compared(*contexts: int, store: Path, steps: int = 30) -> Compared:
    return ab(*({"context": context} for context in contexts), model="tiny", steps=steps, starts=1, store=store)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch, context_1=0.010, context_2=0.011, context_3=0.012)


# --- whose turn it is -------------------------------------------------------------------------------------


def test_sides_alternate_and_each_begins_every_other_round(device: Device, tmp_path: Path) -> None:
    found = compared(1, 2, store=tmp_path / "store.db")
    assert [context for context, _ in device.order] == [1, 2, 2, 1] * 5
    assert {steps for _, steps in device.order} == {3}
    assert device.present == []
    (ratio,) = found.ratios
    assert ratio is not None
    assert (ratio.num_a, ratio.num_b, ratio.decision) == (30, 30, "higher")
    assert ratio.ratio == pytest.approx(1.1)
    places = [[turn.place for turn in run.turns.turns] for run in found.runs if run.turns]
    assert sorted(places[0] + places[1]) == list(range(20))
    with Store.open(tmp_path / "store.db", write=False) as opened:
        assert {row["id"] for row in opened.rows()} == {run.id for run in found.runs}


@pytest.mark.parametrize(("steps", "turns"), [(30, [3] * 10), (10, [1] * 10), (8, [1] * 8), (32, [3] * 10 + [2])])
def test_turns_are_short_and_as_many_as_a_comparison_needs(
    device: Device, tmp_path: Path, steps: int, turns: list[int]
) -> None:
    compared(1, 2, steps=steps, store=tmp_path / "store.db")
    assert sorted((count for context, count in device.order if context == 1), reverse=True) == turns


def test_of_three_sides_each_is_compared_with_the_first(device: Device, tmp_path: Path) -> None:
    found = compared(1, 2, 3, store=tmp_path / "store.db")
    assert [context for context, _ in device.order][:12] == [1, 2, 3, 3, 2, 1] * 2
    assert [ratio and ratio.ratio for ratio in found.ratios] == pytest.approx([1.1, 1.2])
    assert [ratio and ratio.num_a for ratio in found.ratios] == [30, 30]


def test_sides_that_do_not_fit_together_alternate_as_processes(device: Device, tmp_path: Path) -> None:
    device.holds = 1
    found = compared(1, 2, store=tmp_path / "store.db")
    assert device.order == [(1, 15), (2, 30), (1, 15)]
    assert all(run.turns and run.turns.alternating and "does not hold" in run.turns.alternating for run in found.runs)
    assert [len(run.timing.back_to_back[0].best_s) for run in found.runs if run.timing] == [30, 30]
    (ratio,) = found.ratios
    assert ratio is not None
    assert ratio.decision == "higher"
    assert ratio.threshold == 0.05  # of processes, which differ among themselves


@pytest.mark.parametrize("loads", [True, False])
def test_a_side_takes_the_process_that_loaded_while_the_one_before_was_built(device: Device, loads: bool) -> None:
    device.loads = loads
    with Session(loads_ahead=True) as session:
        sides = [session.enter(label, spec) for label, spec in zip("ABC", specs(1, 2, 3), strict=True)]
        session.measure(sides, 30)
        assert [session.leave(side).failure for side in sides] == [None] * 3
    assert [process.task is not None for process in device.started].count(True) == 3
    assert len(device.started) == 3 + (1 if loads else 3)
    assert all(process.ended for process in device.started)


def test_a_side_of_elsewhere_does_not_take_it(device: Device, tmp_path: Path) -> None:
    with Session(loads_ahead=True) as session:
        session.enter("A", specs(1)[0])
        there = session.enter("B", specs(2)[0], Surroundings(folder=tmp_path))
        assert device.started.index(there.conversation) == 2  # type: ignore[arg-type]  # A, what was loaded, B
        assert device.started[1].task is None


def test_sides_wait_again_once_the_one_that_did_not_fit_has_left(device: Device) -> None:
    device.holds = 2
    with Session() as session:
        first, second = (session.enter(label, spec) for label, spec in zip("AB", specs(1, 2), strict=True))
        session.measure([first, second], 10)
        ids = [side.run.id for side in (first, second) if side.run]
        third = session.enter("C", specs(3)[0])
        assert session.alternating
        session.measure([first, third], 10, apart=False)
        assert [context for context, _ in device.order] == [1, 2, 2, 1] * 5
        assert session.leave(third).failure is not None
        session.resume()
        session.measure([first, second], 10)
        runs = [session.leave(side) for side in (first, second)]
    assert [context for context, _ in device.order] == [1, 2, 2, 1] * 10
    assert [run.id for run in runs] == ids, "what was told of a side until now is of its record"
    for run in runs:
        assert run.turns is not None
        assert run.timing is not None
        assert run.turns.alternating is None
        assert sum(turn.steps for turn in run.turns.turns) == len(run.timing.back_to_back[0].best_s) == 20
    ratio = sure(step_ratio(*runs))
    assert (ratio.num_a, ratio.num_b, ratio.decision) == (20, 20, "higher")


def test_a_side_that_does_not_fit_by_itself_is_a_failure(device: Device) -> None:
    device.holds = 0
    with Session() as session:
        side = session.enter("A", specs(1)[0])
        assert side.failure == OUT_OF_MEMORY
        assert session.alternating is None
        assert session.leave(side).failure == OUT_OF_MEMORY


@pytest.mark.parametrize("dies", [1, 2])
def test_a_side_that_is_killed_is_named_and_the_other_is_kept(device: Device, tmp_path: Path, dies: int) -> None:
    device.dies = {dies: 4}
    found = compared(1, 2, store=tmp_path / "store.db")
    lost, kept = found.runs[dies - 1], found.runs[2 - dies]
    assert lost.failure == KILLED
    assert kept.failure is None
    assert len(sure(kept.timing).back_to_back[0].best_s) in (9, 12)
    assert found.ratios == (None,)
    assert device.present == []
    with Store.open(tmp_path / "store.db", write=False) as opened:
        assert {row["status"] for row in opened.rows()} == {"ok", "crashed"}


def test_an_interruption_keeps_the_steps_until_then(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Process.give

    def give(self: Process, turn: Turn) -> Failure | None:
        if turn.place == 6:
            raise KeyboardInterrupt
        return turns(self, turn)

    monkeypatch.setattr(Process, "give", give)
    with pytest.raises(KeyboardInterrupt, match=r"stored with the turns until then: [0-9a-f]{12}, [0-9a-f]{12}$"):
        compared(1, 2, store=tmp_path / "store.db")
    assert device.present == []
    with Store.open(tmp_path / "store.db", write=False) as opened:
        runs = [opened.get(str(row["id"])) for row in opened.rows()]
    assert [len(run.timing.back_to_back[0].best_s) for run in runs if isinstance(run, Run) and run.timing] == [9, 9]


def test_unlike_sides_are_refused(device: Device, tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    with pytest.raises(UserError, match="the same --steps"):
        ab({"context": 1, "steps": 10}, {"context": 2, "steps": 20}, model="tiny", store=store)
    assert device.order == []


def test_sides_start_three_times_where_that_is_soon_and_the_spread_of_starts_is_in_the_interval(
    device: Device, tmp_path: Path
) -> None:
    def faster(_: str) -> None:
        device.step_s[2] *= 0.98  # each start of B is faster than the one before

    found = ab({"context": 1}, {"context": 2}, model="tiny", store=tmp_path / "store.db", on_side=faster)
    assert [len(runs) for runs in found.starts] == [2, 2, 2]
    assert len({run.turns.session for run in found.runs if run.turns}) == 3
    logs = [math.log(ratio.ratio) for (ratio,) in found.each if ratio]
    (ratio,) = found.ratios
    assert ratio is not None
    assert math.log(ratio.ratio) == pytest.approx(fmean(logs))
    assert math.log(ratio.ratio / sure(ratio.low)) == pytest.approx(4.303 * stdev(logs) / math.sqrt(3))
    assert ratio.decision == "undecided", "1.03 ± 0.1"
    text = render(turns_document(found.starts, found.each, ["1", "2"]), "table", width=200)
    assert "The sides started 3 times." in text
    assert text.count("2, all starts") == 1
    assert ab({"context": 1}, {"context": 3}, model="tiny", starts=2, store=tmp_path / "store.db").starts[1:]
    with pytest.raises(UserError, match="at least 1"):
        ab({"context": 1}, {"context": 3}, starts=0, store=tmp_path / "store.db")


# --- the record of a step in turns ------------------------------------------------------------------------


def test_a_record_has_the_steps_of_all_turns_and_those_before_them_apart(torch_settings_put_back: None) -> None:
    spec = resolve_step({"model": "toy", "batch": 1, "context": 4, "warmup": 2, "device": "cpu"})
    given: Iterator[Turn | None] = iter([Turn(place=0, steps=2), Turn(place=3, steps=1), Turn(place=4, steps=2), None])
    told: list[Run] = []
    observer = Observer(next_turn=lambda: next(given), on_measured=told.append)
    run = measure_here(spec, observer, turns=Turns(session="s", label="A"))
    assert run == told[-1]
    assert [len(each.timing.back_to_back[0].best_s) for each in told if each.timing] == [2, 3, 5]
    assert run.timing is not None
    assert run.turns is not None
    assert [(turn.place, turn.steps, len(turn.lead_in_s)) for turn in run.turns.turns] == [
        (0, 2, 1),
        (3, 1, 1),
        (4, 2, 1),
    ]
    assert {len(phase.best_s) for phase in run.timing.back_to_back} == {5}
    assert {len(phase.best_s) for phase in run.timing.warmup} == {2}
    assert run_row(run)["steps"] == 5, "those measured, not the 10 of the spec"
    assert list(run.problems()) == []
    wrong = dataclasses.replace(run, turns=dataclasses.replace(run.turns, turns=run.turns.turns[:2]))
    assert [path for path, _ in wrong.problems()] == [".turns"]


def test_steps_of_a_turn_are_cut_into_blocks() -> None:
    turns = Turns(session="s", label="A", turns=(Turn(place=0, steps=2), Turn(place=3, steps=5)))
    samples = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert turns.blocks_of(samples) == ((0, (1.0, 2.0)), (3, (3.0, 4.0, 5.0)), (3, (6.0, 7.0)))


# --- the ratio --------------------------------------------------------------------------------------------


def in_turns(label: str, blocks: dict[int, float], session: str = "s") -> Run:
    samples = tuple(seconds for seconds in blocks.values() for _ in range(3))
    turns = tuple(Turn(place=place, steps=3) for place in blocks)
    timing = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", host_s=samples),))
    return make_run(id=new_id(), timing=timing, turns=Turns(session=session, label=label, turns=turns))


def drifting(place: int) -> float:
    return 0.1 * 1.02**place


def test_a_drift_of_the_machine_cancels() -> None:
    """Rounds A B, B A, ...: neither side is later on average, so equal steps have ratio 1."""
    places = [[0, 3, 4, 7, 8, 11, 12, 15, 16, 19], [1, 2, 5, 6, 9, 10, 13, 14, 17, 18]]
    a, b = (in_turns(label, {p: drifting(p) for p in of}) for label, of in zip("AB", places, strict=True))
    slower = in_turns("B", {p: 1.1 * drifting(p) for p in places[1]})
    same, planted = step_ratio(a, b), step_ratio(a, slower)
    assert same is not None
    assert planted is not None
    assert same.ratio == pytest.approx(1, abs=0.02)
    assert same.decision != "higher"
    assert planted.decision == "higher"
    before, after = (Side(told=name, ids=(run.id,)) for name, run in (("A", a), ("B", slower)))
    [figure] = [each for each in compare(before, after, [a], [slower]).figures if each.name == "step time"]
    assert figure.ratio is not None, "`compare` of the two records says the same"
    assert (figure.ratio.ratio, figure.ratio.low) == (planted.ratio, planted.low)


def test_three_per_cent_are_found_and_nothing_in_equal_sides() -> None:
    """Thirty steps per side, each off by 1 %, on a machine that slows by 20 %."""
    random = Random(1)

    def noisy(places: Sequence[int], scale: float) -> Run:
        turns = tuple(Turn(place=place, steps=3) for place in places)
        of_turn = [scale * (1 + 0.01 * place) for place in places]
        samples = tuple(seconds * random.gauss(1, 0.01) for seconds in of_turn for _ in range(3))
        timing = Timing(warmup=(), back_to_back=(PhaseSamples(phase="step", host_s=samples),))
        return make_run(id=new_id(), timing=timing, turns=Turns(session="s", label="A", turns=turns))

    places = [0, 3, 4, 7, 8, 11, 12, 15, 16, 19], [1, 2, 5, 6, 9, 10, 13, 14, 17, 18]
    slower = [step_ratio(noisy(places[0], 0.1), noisy(places[1], 0.103), threshold=0.005) for _ in range(60)]
    equal = [step_ratio(noisy(places[0], 0.1), noisy(places[1], 0.1), threshold=0.005) for _ in range(60)]
    assert sum(ratio is not None and ratio.decision == "higher" for ratio in slower) >= 57
    assert sum(ratio is not None and ratio.decision in ("higher", "lower") for ratio in equal) <= 1


def test_only_turns_beside_each_other_count() -> None:
    a = in_turns("A", {0: 0.9, 3: 0.9, 4: 0.1, 7: 0.1, 8: 0.1})
    b = in_turns("B", {5: 0.2, 6: 0.2, 9: 0.2})
    ratio = sure(step_ratio(a, b))
    assert (ratio.a, ratio.b, ratio.num_a) == (0.1, 0.2, 9)
    per_token = sure(step_ratio(a, b, tokens_ratio=4))
    assert per_token.ratio == pytest.approx(0.5)


def test_runs_of_two_sessions_took_no_turns() -> None:
    assert step_ratio(in_turns("A", {0: 0.1}), in_turns("B", {1: 0.1}, session="other")) is None
    assert step_ratio(make_run(), make_run()) is None


def test_labels_are_letters() -> None:
    assert [lab_turns.label_of(number) for number in (0, 1, 25, 26)] == ["A", "B", "Z", "27"]
