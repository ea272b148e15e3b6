import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from tests.comm_records import make_comm, make_comm_cell
from tests.conversations import say, task_of
from tests.sure import sure
from tests.unit.test_loop import FakeDevice
from torch import Tensor

from steplab.costs.communication import Point, bus_factor, fit_line, wire_bytes
from steplab.errors import SteplabError, UserError
from steplab.lab import comm as lab
from steplab.lab.comm import collective_cells, comm_study, profile_of
from steplab.measurement import clock
from steplab.measurement.comm.session import Together, back_to_back, time_calls
from steplab.measurement.processes.conversation import Listener
from steplab.measurement.processes.launch import measure_cells
from steplab.measurement.processes.wire import Request
from steplab.records.comm import CommCell, RankTimes
from steplab.records.failure import Failure
from steplab.specs.comm import COLLECTIVES, CommSpec, CommStudy, comm_cells, worlds_of
from steplab.units import format_message, parse_bytes

# --- what is asked ----------------------------------------------------------------------------------------


def test_gpus_get_the_sizes_of_the_convention_and_a_laptop_smaller_ones() -> None:
    gpus = comm_cells({}, num_processes=4, on_gpus=True)
    assert {cell.size_bytes for cell in gpus} == {10**6, 10**7, 10**8, 10**9}
    assert {(cell.backend, cell.device, cell.dtype) for cell in gpus} == {("nccl", "cuda", "fp32")}
    assert {cell.world_size for cell in gpus} == {2, 4}
    assert len(gpus) == 4 * 2 * len(COLLECTIVES)
    laptop = comm_cells({}, num_processes=2, on_gpus=False)
    assert {(cell.backend, cell.device, cell.world_size) for cell in laptop} == {("gloo", "cpu", 2)}
    assert max(cell.size_bytes for cell in laptop) == 10**7
    crowd = comm_cells({}, num_processes=1024, on_gpus=False)  # of whom each has 16 bytes at the least
    assert min(cell.size_bytes for cell in crowd if cell.world_size == 1024) == 10**5
    assert min(cell.size_bytes for cell in crowd if cell.world_size == 512) == 10**4
    assert [worlds_of(n) for n in (2, 3, 4, 6, 8)] == [[2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


def test_a_backend_gets_the_devices_it_can_serve() -> None:
    both = {"backend": ["nccl", "gloo"], "collective": ["all-reduce"], "size": ["1MB"], "world_size": ["2"]}
    assert [cell.transport for cell in comm_cells(both, num_processes=2, on_gpus=True)] == ["nccl", "gloo"]
    every = comm_cells(both | {"device": ["cuda", "cpu"]}, num_processes=2, on_gpus=True)
    assert [cell.transport for cell in every] == ["nccl", "gloo on cuda", "gloo"]
    copies = comm_cells({"backend": ["nccl", "peer_copy"], "size": ["1MB"]}, num_processes=2, on_gpus=True)
    assert [cell.collective for cell in copies if cell.backend == "peer_copy"] == ["all_reduce"]
    assert len(copies) == len(COLLECTIVES) + 1


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ({"collective": ["gossip"]}, "collective 'gossip' is not known; choose one of all_reduce, all_gather"),
        ({"backend": ["mpi"]}, "backend 'mpi' is not known; choose one of nccl, gloo, peer_copy"),
        ({"backend": ["nccl"], "device": ["cpu"]}, "nccl cannot send tensors on cpu; use --backend gloo"),
        ({"device": ["tpu"]}, "device 'tpu' is not known; choose one of cuda, cpu"),
        ({"dtype": ["fp8"]}, "dtype 'fp8' is not known; choose one of fp32, bf16, fp16"),
        ({"size": ["large"]}, "'large' is not a size; write it as 4096, 10kB, 1MB or 1MiB"),
        ({"size": ["24"]}, "size must be at least 16 bytes per rank (32 B) and at most 1 TB, not 24 B"),
        ({"world_size": ["1"]}, "world_size must be at least 2 and below 2^63, not 1"),
        ({"world_size": ["two"]}, "world_size must be a whole number, not 'two'"),
        ({"world_size": ["3"]}, "world-size 3 needs 3 processes, but only 2 are started; start more with --gpus 3"),
        (
            {"backend": ["peer_copy"], "collective": ["broadcast"]},
            "backend peer_copy has no broadcast; choose all_reduce, or another backend",
        ),
        ({"topology": ["ring"]}, "unknown field 'topology'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(lists: dict[str, Sequence[object]], said: str) -> None:
    with pytest.raises(UserError) as refused:
        CommStudy(cells=comm_cells(lists, num_processes=2, on_gpus=False), num_processes=2)
    assert said in str(refused.value)


def test_a_part_is_of_whole_sixteens_and_a_message_of_whole_parts() -> None:
    for collective in COLLECTIVES:
        for world in (2, 3, 5):
            for dtype in ("fp32", "bf16"):
                spec = CommSpec(collective=collective, size_bytes=10_007, world_size=world, dtype=dtype)
                parts = world if collective in ("all_gather", "reduce_scatter", "all_to_all") else 1
                part_bytes = spec.part_elements * spec.element_bytes
                assert part_bytes % 16 == 0
                assert spec.message_bytes == part_bytes * parts
                assert 10_007 - 16 * parts < spec.message_bytes <= 10_007


def test_a_number_of_processes_is_found_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "visible_gpus", lambda: 4)
    study, device = comm_study({})
    assert (study.num_processes, device, study.cells[0].backend) == (4, "cuda", "nccl")
    monkeypatch.setattr(lab, "visible_gpus", lambda: 1)
    study, device = comm_study({"repeats": 7})
    assert (study.num_processes, device, study.least_repeats, study.most_repeats) == (2, "cpu", 7, 7)
    for given in (["2", "4", "6"], [6, 2, 4]):
        study, device = comm_study({"processes": given, "collective": "all_reduce", "size": "1MB"})
        assert (study.num_processes, device) == (6, "cpu")
        assert {cell.world_size for cell in study.cells} == {2, 4, 6}
    assert {cell.world_size for cell in comm_study({"processes": ["2", "6"]})[0].cells} == {2, 6}
    with pytest.raises(UserError, match=r"processes must be a whole number, not '2\.5'"):
        comm_study({"processes": "2.5"})
    with pytest.raises(UserError, match="--processes must be at least 2, not 1: a collective needs two processes"):
        comm_study({"processes": 1})
    with pytest.raises(UserError, match=r"^1000000 processes do not fit: each takes at least 128 MiB"):
        comm_study({"processes": 10**6})
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert comm_study({})[0].num_processes == 3
    with pytest.raises(UserError, match="torchrun started 3 processes, not 2"):
        comm_study({"processes": 2})


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("10kB", 10_000), ("1 MB", 10**6), ("2.5MB", 2_500_000), ("1GB", 10**9), ("64KiB", 65536)],
)
def test_sizes_are_decimal_unless_they_say_otherwise(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "1.5", "-1", "0", "1XB", "nan", "1e400"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_shown_without_digits_that_say_nothing() -> None:
    assert [format_message(n) for n in (640, 10_000, 2_500_000, 10**9)] == ["640 B", "10 kB", "2.5 MB", "1 GB"]


# --- bytes on the wire ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_factors_are_those_of_a_ring_that_is_played_through(n: int) -> None:
    part = 1 / n
    sent = {
        "reduce_scatter": sum(part for _ in range(n - 1)),  # each step passes one part on
        "all_gather": sum(part for _ in range(n - 1)),
        "all_reduce": sum(part for _ in range(n - 1)) + sum(part for _ in range(n - 1)),  # the one, then the other
        "all_to_all": sum(part for other in range(n) if other != 0),  # to each other rank its part
        "broadcast": 1.0,  # the first sends all of it once, down a chain
        "send_recv": 1.0,
    }
    assert set(sent) == set(COLLECTIVES)
    for collective, share in sent.items():
        assert bus_factor(collective, n) == pytest.approx(share)


# --- the line ---------------------------------------------------------------------------------------------

SIZES = [1e4, 1e5, 1e6, 1e7, 1e8, 1e9]


def points(
    model: Callable[[float, int], float],
    worlds: Sequence[int] = (2,),
    noise: float = 0.0,
    sizes: Sequence[float] = SIZES,
) -> list[Point]:
    rng = random.Random(0)
    return [
        Point(wire_bytes=size, world_size=n, time_s=model(size, n) * (1 + noise * rng.uniform(-1, 1)))
        for n in worlds
        for size in sizes
    ]


@pytest.mark.parametrize(("alpha_s", "bandwidth"), [(25e-6, 340e9), (3e-4, 1e9), (1e-6, 4e12)])
def test_a_planted_line_is_found(alpha_s: float, bandwidth: float) -> None:
    line = sure(fit_line(points(lambda size, n: alpha_s + size / bandwidth)))
    assert line.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert line.beta_s_per_byte == pytest.approx(1 / bandwidth, rel=1e-6)
    assert line.rms_relative == pytest.approx(0, abs=1e-9)
    noisy = sure(fit_line(points(lambda size, n: alpha_s + size / bandwidth, noise=0.05)))
    assert noisy.alpha_s == pytest.approx(alpha_s, rel=0.1)
    assert noisy.beta_s_per_byte == pytest.approx(1 / bandwidth, rel=0.1)
    assert 0 < noisy.rms_relative < abs(noisy.worst_relative) < 0.1


def test_a_planted_term_a_rank_is_found_over_world_sizes() -> None:
    line = sure(fit_line(points(lambda size, n: 1e-5 + size / 1e11 + 4e-6 * n, worlds=(2, 4, 8)), by_rank=True))
    assert line.gamma_s_per_rank == pytest.approx(4e-6, rel=1e-6)
    assert line.alpha_s == pytest.approx(1e-5, rel=1e-6)
    assert line.beta_s_per_byte == pytest.approx(1e-11, rel=1e-6)


def test_no_term_is_negative_and_the_rest_is_the_best_without_it() -> None:
    falling = sure(fit_line(points(lambda size, n: 1e-3 if size < 1e6 else 0.9e-3)))
    assert falling.beta_s_per_byte == 0
    times = [1e-3, 1e-3, 0.9e-3, 0.9e-3, 0.9e-3, 0.9e-3]
    best = sum(1 / t for t in times) / sum(1 / t**2 for t in times)  # where the derivative of the squares is zero
    assert falling.alpha_s == pytest.approx(best)
    steep = sure(fit_line(points(lambda size, n: 1e-9 * size**1.2)))
    assert steep.alpha_s >= 0 <= steep.beta_s_per_byte


def test_too_few_sizes_give_no_line() -> None:
    """A line fits two sizes exactly, whatever the noise."""
    assert fit_line([]) is None
    assert fit_line(points(lambda size, n: 1e-3, sizes=[1e6])) is None
    assert fit_line(points(lambda size, n: 1e-5 + size / 1e9, sizes=[1e6, 1e7], noise=0.5)) is None
    assert fit_line(points(lambda size, n: 1e-5 + size / 1e9, sizes=[1e6, 1e7, 1e7], noise=0.5)) is None
    three = sure(fit_line(points(lambda size, n: 1e-5 + size / 1e9, sizes=[1e6, 1e7, 1e8], noise=0.5)))
    assert three.rms_relative > 0.01
    assert fit_line(points(lambda size, n: 1e-3 + size / 1e9), by_rank=True) is None


def test_a_profile_has_a_line_for_each_collective_and_world_size() -> None:
    run = make_comm()
    assert len(run.profile) == len(COLLECTIVES) * 3  # two world sizes, and both together
    for cell in run.cells:
        assert cell.slowest is not None
        [line] = [
            fit
            for fit in run.profile
            if (fit.collective, fit.way, fit.world_size)
            == (cell.spec.collective, cell.spec.transport, cell.spec.world_size)
        ]
        predicted = line.alpha_s + line.beta_s_per_byte * wire_bytes(cell.spec)
        assert predicted == pytest.approx(cell.slowest.median_s, rel=0.05)
    assert profile_of([]) == ()


# --- processes that end -----------------------------------------------------------------------------------


def talk(*messages: tuple[str, object], failure: Failure | None = None) -> Callable[..., Failure | None]:
    def converse(request: Request, listener: Listener, timeout_s: float | None) -> Failure | None:
        for kind, value in messages:
            say(listener, kind, value)
        return failure

    return converse


def asked() -> CommStudy:
    return CommStudy(cells=comm_cells({"size": ["1MB"]}, num_processes=2, on_gpus=False)[:3], num_processes=2)


def heard(*conversations: Callable[..., Failure | None]) -> tuple[dict[int, CommCell], list[list[int]]]:
    left = list(conversations)
    cells: dict[int, CommCell] = {}
    requests: list[list[int]] = []

    def converse(request: Request, listener: Listener, timeout_s: float | None) -> Failure | None:
        assert request.processes == 2
        assert request.device == "cpu"
        requests.append(task_of(request).numbers)
        return left.pop(0)(request, listener, timeout_s)

    measure_cells(collective_cells(asked(), "cpu"), on_cell=cells.__setitem__, converse=converse)
    assert not left
    return cells, requests


def test_a_cell_that_kills_a_rank_fails_and_the_others_go_on_in_new_processes() -> None:
    cells = [make_comm_cell(spec) for spec in asked().cells]
    died = Failure(kind="crashed", message="rank 1 on vm: the process was ended by SIGKILL", rank=1)
    found, requests = heard(
        talk(("at", [0]), ("cell", [0, cells[0]]), ("at", [1]), failure=died),
        talk(("at", [2]), ("cell", [2, cells[2]])),
    )
    assert requests == [[0, 1, 2], [2]]
    assert found[0] == cells[0]
    assert found[1].failure == died
    assert found[2] == cells[2]


def test_a_refusal_passes() -> None:
    def refuse(request: Request, listener: Listener, timeout_s: float | None) -> Failure | None:
        raise SteplabError("no")

    with pytest.raises(SteplabError, match="no"):
        heard(refuse)


LAUNCH_S, WORK_S, BARRIER_S = 1, 8, 2


class Alone:
    rank, size = 1, 2

    def __init__(self, device: FakeDevice, others_s: float = 0.0) -> None:
        self.device, self.others_s, self.agreed = device, others_s, 0
        self.others_late: Iterator[bool] = iter(())

    def host_maximum(self, values: Tensor) -> Tensor:
        if values.tolist() == [0]:
            self.device.events.append("barrier")
            self.device.host_s += BARRIER_S
        else:
            self.agreed += 1
        return torch.maximum(values, torch.tensor([int(self.others_s * 1e9)]))

    def host_gather(self, value: object) -> list[object]:
        return [value, next(self.others_late, False) if isinstance(value, bool) else value]

    def all_reduce(self, tensor: Tensor, *, average: bool) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)


def clocked(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: device.host_s))


def timed(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, others_s: float = 0.0) -> tuple[RankTimes, int]:
    clocked(monkeypatch, device)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        device.phase("call", [(LAUNCH_S, WORK_S)]).run()

    study = CommStudy(
        cells=(CommSpec(),), num_processes=2, warmup_s=85.0, measured_s=120.0, least_repeats=4, most_repeats=30
    )
    collectives = Alone(device, others_s)
    times = time_calls(call, Together(device=device, collectives=collectives), study)  # type: ignore[arg-type]
    return times, calls


def test_calls_go_back_to_back_after_one_barrier_and_then_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    times, calls = timed(monkeypatch, device)
    # Five calls take 41 s, so that eleven warm it up; 120 s are 14 of those eleven's mean. A row more is tried before.
    assert calls == 5 + 6 + (5 + 1) + (14 + 1) + 14
    assert times.rank == 1
    assert times.device_s == (WORK_S,) * 14  # the host runs ahead
    assert times.alone_s == (LAUNCH_S + WORK_S,) * 14  # and here it waits for each
    assert (times.calls_per_sample, times.num_waits) == (1, 0)
    assert times.best_s == times.device_s
    loop_events = device.events[device.events.index("reserve marks") :]
    assert loop_events.count("barrier") == 1 + 14  # one before the row, and one before each call by itself
    first = loop_events.index("barrier")
    row = loop_events[first : loop_events.index("barrier", first + 1)]
    calls_at = [place for place, event in enumerate(row) if event == "call"]
    assert len(calls_at) == 14 + 1
    assert "synchronize" not in row[calls_at[0] : calls_at[-1]]  # nothing is waited for between two calls


def test_the_slowest_rank_says_how_many_calls_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    times, calls = timed(monkeypatch, FakeDevice(), others_s=40.0)
    assert (
        calls == 5 + 2 + (5 + 1) + (4 + 1) + 4
    )  # 40 s a call: warm when two batches agree, and the least number of repeats
    assert len(times.alone_s) == 4


def test_a_call_is_warm_when_it_no_longer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(asynchronous=False)
    clocked(monkeypatch, device)
    costs = [100.0] * 5 + [40.0] * 2 + [10.0] * 500  # first calls, then two processes on one core, then settled

    def call() -> None:
        device.host_s += costs.pop(0)

    study = CommStudy(cells=(CommSpec(),), num_processes=2, warmup_s=400.0, measured_s=100.0, most_repeats=50)
    times = time_calls(call, Together(device=device, collectives=Alone(device)), study)  # type: ignore[arg-type]
    assert set(times.alone_s) == {10.0}
    assert len(times.alone_s) == 10

    never = iter(range(1, 10**6))  # each call twice as long, or half as long, as the one before it

    def restless() -> None:
        device.host_s += 10.0 if next(never) & 64 else 30.0

    time_calls(restless, Together(device=device, collectives=Alone(device)), study)  # type: ignore[arg-type]
    assert next(never) < 600, "it is given up after ten times the warm-up"


def test_a_host_that_is_the_device_is_timed_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    times, _ = timed(monkeypatch, FakeDevice(asynchronous=False))
    assert times.device_s is None
    assert times.num_waits is None
    assert times.best_s == times.alone_s == (LAUNCH_S + WORK_S,) * len(times.alone_s)


def rows_of(
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    costs: list[tuple[float, float]],
    samples: int,
    *,
    waits: bool = False,
) -> RankTimes:
    clocked(monkeypatch, device)
    phase = device.phase("call", costs)

    def call() -> None:
        phase.run()
        if waits:
            device.synchronize()

    together = Together(device=device, collectives=Alone(device))  # type: ignore[arg-type]
    return back_to_back(call, together, lambda calls: samples)


def test_the_call_in_which_ranks_wait_for_each_other_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = rows_of(FakeDevice(), monkeypatch, [(1, 500), *[(1, 8)] * 5] * 2, 5)
    assert times.device_s == pytest.approx((8,) * 5)


def test_a_device_that_would_wait_for_python_is_held_before_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    times = rows_of(device, monkeypatch, [(400e-6, 120e-6)] * 10_000, 30)
    assert times.device_s == pytest.approx((120e-6,) * 30)
    assert (times.calls_per_sample, times.num_waits) == (9, 0)  # a millisecond's worth
    # Python takes 2.4 ms for 6 calls and 80 ms for 199: each row is made twice. The last has 8 samples.
    assert times.held_s == pytest.approx(1.5 * 199 * 400e-6)
    assert device.events.count("call") == 2 * 6 + 2 * 199 + 73


def test_another_ranks_wait_has_the_row_made_again_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    clocked(monkeypatch, device)
    phase = device.phase("call", [(1e-3, 2e-3)] * 100)
    together = Together(device=device, collectives=Alone(device, others_s=0.25e-3))  # type: ignore[arg-type]
    together.collectives.others_late = iter([False, True])  # type: ignore[attr-defined]
    times = back_to_back(phase.run, together, lambda calls: 3)
    assert (len(times.device_s or ()), times.num_waits) == (3, 0)
    assert device.events.count("call") == 6 + 4 + 4


def test_the_slowest_ranks_time_says_how_many_calls_a_sample_has(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    clocked(monkeypatch, device)
    phase = device.phase("call", [(10e-6, 120e-6)] * 1000)
    together = Together(device=device, collectives=Alone(device, others_s=0.25e-3))  # type: ignore[arg-type]
    assert back_to_back(phase.run, together, lambda calls: 3).calls_per_sample == 4


def test_a_call_that_waits_itself_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    times = rows_of(device, monkeypatch, [(1, 8)] * 100, 3, waits=True)
    assert times.device_s == (9, 9, 9)
    assert times.num_waits == 3
    assert device.events.count("call") == 6 + 6 + 4  # tried without a hold, and in vain with the longest
