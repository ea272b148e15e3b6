from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.raw_trace import read_events, top_ranges
from tests.runs import make_run, out_of_memory
from tests.sure import sure
from tests.unit.test_session import Failing, allocate, batch, explode, lack
from torch import Tensor, nn

from steplab.errors import SteplabError
from steplab.lab.keeping import load
from steplab.lab.profiling import is_recorded_elsewhere, profile
from steplab.measurement import step_job as session
from steplab.measurement.clock import Phase
from steplab.measurement.jobs import StepTask
from steplab.measurement.observer import Observer
from steplab.measurement.profile import profiler as under_test
from steplab.measurement.profile.profiler import StepProfiler
from steplab.measurement.step.step import WholeStep
from steplab.measurement.step_job import measure_here
from steplab.model.build import build_workload
from steplab.model.workload import Workload
from steplab.ops.attention.plain import no_span, plain_attention
from steplab.records.run import Run
from steplab.records.timing import curve
from steplab.specs.resolve import resolve_step
from steplab.specs.step import CHOICES

TINY: dict[str, object] = {
    "model": "tiny", "model.num_layers": 2, "model.d_model": 16, "model.d_ff": 24, "model.num_heads": 2,
    "model.vocab_size": 31, "batch": 2, "context": 5, "warmup": 1, "steps": 2, "device": "cpu",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("torch_settings_put_back")


def profiled(trace: Path, *, num_steps: int = 2, pass_name: str = "train", **fields: object) -> Run:
    spec = resolve_step(TINY | {"pass": pass_name} | fields)
    return measure_here(spec, Observer(), partial(StepProfiler, num_steps=num_steps, trace=trace))


def of_this_file(factory: Callable[[], object], trace: Path, observer: Observer | None = None, **fields: object) -> Run:
    name = f"{factory.__module__}:{factory.__name__}"
    spec = resolve_step({"model": name, "device": "cpu", "warmup": 1, "steps": 2} | fields)
    return measure_here(spec, observer or Observer(), partial(StepProfiler, num_steps=3, trace=trace))


def attention(layer: str, parts: tuple[str, ...]) -> dict[str, Any]:
    names = [f"{layer}.query", f"{layer}.key", f"{layer}.value", *parts, f"{layer}.output"]
    return {name: {} for name in names}


def block(layer: str, parts: tuple[str, ...]) -> dict[str, Any]:
    return {
        f"{layer}.attention_norm": {},
        f"{layer}.attention": attention(f"{layer}.attention", parts),
        f"{layer}.feed_forward_norm": {},
        f"{layer}.feed_forward": {f"{layer}.feed_forward.{name}": {} for name in ("gate", "up", "down")},
    }


def forward(parts: tuple[str, ...]) -> dict[str, Any]:
    blocks = {f"blocks.{number}": block(f"blocks.{number}", parts) for number in range(2)}
    return {"embedding": {}, **blocks, "norm": {}, "head": {}, "loss": {}}


PARTS = ("scores", "softmax", "values")
PHASES = {
    "forward": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train": ("forward", "backward", "optimizer"),
}


# --- what the trace holds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_name", CHOICES["pass_name"])
def test_every_step_is_marked_whole_by_phase_by_module_and_by_part(tmp_path: Path, pass_name: str) -> None:
    trace = tmp_path / "trace.json"
    run = profiled(trace, num_steps=3, pass_name=pass_name)
    assert run.failure is None
    steps = top_ranges(trace, "step")
    expected = {phase: forward(PARTS) if phase == "forward" else {} for phase in PHASES[pass_name]}
    assert [step.ranges() for step in steps] == [expected] * 3
    (warmup,) = top_ranges(trace, "warmup step")
    assert warmup.ranges() == expected
    assert warmup.end_us <= steps[0].start_us


def test_fused_attention_has_no_parts(tmp_path: Path) -> None:
    profiled(tmp_path / "trace.json", attention="sdpa")
    steps = top_ranges(tmp_path / "trace.json", "step")
    assert steps
    for step in steps:
        assert step.ranges()["forward"] == forward(())


def test_a_compressed_trace_is_the_same_trace(tmp_path: Path) -> None:
    profiled(tmp_path / "trace.json.gz")
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert len(top_ranges(tmp_path / "trace.json.gz", "step")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_the_operators_lie_in_the_part_that_they_compute(tmp_path: Path) -> None:
    profiled(tmp_path / "trace.json")
    step = top_ranges(tmp_path / "trace.json", "step")[0]
    (marked,) = [event for event in step.inside if event.name == "forward"]

    def operators(where: str, name: str) -> int:
        return sum(len(part.named(name)) for part in marked.named(where))

    num_layers = 2
    assert operators("forward", "aten::bmm") == 2 * num_layers
    assert operators("scores", "aten::bmm") == operators("values", "aten::bmm") == num_layers
    assert operators("forward", "aten::_softmax") == operators("softmax", "aten::_softmax") == num_layers
    assert operators("forward", "aten::cross_entropy_loss") == operators("loss", "aten::cross_entropy_loss") == 1
    assert operators("blocks.0.feed_forward.down", "aten::linear") == 1


def test_a_backward_operator_can_be_told_by_number_from_the_part_it_belongs_to(tmp_path: Path) -> None:
    profiled(tmp_path / "trace.json", num_steps=1)
    path = tmp_path / "trace.json"
    step = top_ranges(path, "step")[0]
    forward_numbers = [
        softmax.arguments["Sequence number"]
        for part in step.named("softmax")
        for softmax in part.named("aten::softmax")
    ]
    everything = [event for top in read_events(path) for event in top.all()]
    nodes = [event for event in everything if event.name == "SoftmaxBackward0"]
    backward_numbers = [node.arguments["Sequence number"] for node in nodes if node.start_us > step.start_us]
    assert len(forward_numbers) == 2
    assert sorted(forward_numbers) == sorted(backward_numbers)


def test_the_trace_has_the_shapes_of_the_operands(tmp_path: Path) -> None:
    profiled(tmp_path / "trace.json")
    step = top_ranges(tmp_path / "trace.json", "step")[0]
    (part,) = [part for part in step.named("scores") if part.named("aten::bmm")][:1]
    (product,) = part.named("aten::bmm")
    batch_heads, context, head_dim = 2 * 2, 5, 8
    assert product.arguments["Input Dims"] == [[batch_heads, context, head_dim], [batch_heads, head_dim, context]]


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_a_compiled_step_is_marked_by_phase_alone_and_the_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """Hooks and ranges would break its graph, or be compiled in."""
    monkeypatch.setattr(torch, "compile", lambda module, mode: module)
    seen = built(monkeypatch)
    run = profiled(tmp_path / "trace.json", compile="default", attention=attention)
    for step in top_ranges(tmp_path / "trace.json", "step"):
        assert step.ranges() == {"forward": {}, "backward": {}, "optimizer": {}}
    assert any(note.startswith("ranges: ") for note in run.notes)
    if attention == "plain":
        assert seen[0].blocks[0].attention.attend is plain_attention


def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def build(*arguments: Any, **options: Any) -> Workload:
        workload = build_workload(*arguments, **options)
        seen.append(workload.module)
        return workload

    monkeypatch.setattr(session, "build_workload", build)
    return seen


def test_a_run_that_is_not_profiled_has_a_model_without_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = built(monkeypatch)
    measure_here(resolve_step(TINY), Observer())
    assert seen[0].blocks[0].attention.attend is plain_attention
    assert seen[0].loss is nn.functional.cross_entropy


# --- models of one's own ----------------------------------------------------------------------------------


class Sensing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
        self.noted: list[tuple[bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.modules())
        self.noted.append((torch.autograd.profiler._is_profiler_enabled, hooks))
        return self.encoder(x).sum()


made: list[nn.Module] = []


def sensing() -> tuple[nn.Module, Callable[[], Tensor]]:
    made.append(Sensing())
    return made[-1], lambda: torch.ones(4, 3)


BEFORE_PROFILING = 1 + 2 + 1


def exploding_when_profiled() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(BEFORE_PROFILING + 2, explode), batch


def allocating_when_profiled() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(BEFORE_PROFILING, allocate), batch


def refusing_when_profiled() -> tuple[nn.Module, Callable[[], Tensor]]:
    return Failing(BEFORE_PROFILING, lack), batch


def own_step() -> Callable[[], object]:
    return lambda: torch.ones(3).sin()


def test_a_model_of_ones_own_is_marked_by_its_modules_names(tmp_path: Path) -> None:
    of_this_file(sensing, tmp_path / "trace.json")
    inside: dict[str, Any] = {"encoder": {"encoder.0": {}, "encoder.1": {}}}
    steps = top_ranges(tmp_path / "trace.json", "step")
    assert steps
    for step in steps:
        assert step.ranges() == {"forward": inside, "backward": {}, "optimizer": {}}


def test_a_whole_step_of_ones_own_is_one_range(tmp_path: Path) -> None:
    of_this_file(own_step, tmp_path / "trace.json")
    steps = top_ranges(tmp_path / "trace.json", "step")
    assert [step.ranges() for step in steps] == [{}] * 3
    assert all(step.named("aten::sin") for step in steps)


# --- the timing is that of steps nobody watched -----------------------------------------------------------


def test_no_timed_step_has_a_hook_or_a_profiler(tmp_path: Path) -> None:
    events: list[object] = []

    def on_stage(stage: str, num_steps: int) -> None:
        events.append((stage, num_steps))
        if stage == "profile":
            events.append(len(made[-1].noted))  # type: ignore[arg-type]

    run = of_this_file(sensing, tmp_path / "trace.json", Observer(on_stage=on_stage))
    module = made[-1]
    assert isinstance(module, Sensing)
    assert module.noted == [(False, 0)] * BEFORE_PROFILING + [(True, 2 * 3)] * (1 + 3)
    assert events == [("build", 0), ("warmup", 1), ("measure", 2), ("profile", 3), BEFORE_PROFILING, ("trace", 0)]
    assert len(curve(sure(run.timing))) == 1 + 2
    assert run.profile is None, "the trace is read by others"
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()) == 0


def test_what_was_measured_is_told_before_profiling_begins(tmp_path: Path) -> None:
    told: list[Run] = []
    run = of_this_file(sensing, tmp_path / "trace.json", Observer(on_measured=told.append))
    assert told == [run]


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (exploding_when_profiled, "ZeroDivisionError: the model's own mistake"),
        (allocating_when_profiled, "4.00 EiB more were requested"),
        (refusing_when_profiled, "this is not supported"),
    ],
)
def test_a_failure_under_the_profiler_is_a_note_beside_the_timing(
    tmp_path: Path, factory: Callable[[], object], words: str
) -> None:
    run = of_this_file(factory, tmp_path / "trace.json")
    assert run.failure is None
    assert len(curve(sure(run.timing))) == 3
    (note,) = [note for note in run.notes if note.startswith("profile: ")]
    assert words in note
    assert list(tmp_path.iterdir()) == []
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_trace_that_cannot_be_written_is_a_note_beside_the_timing(tmp_path: Path) -> None:
    run = of_this_file(sensing, tmp_path / "missing" / "trace.json.gz")
    assert run.failure is None
    assert run.timing is not None
    assert any(note.startswith("profile: ") for note in run.notes)


def test_a_failure_before_is_a_failure_and_nothing_is_profiled(tmp_path: Path) -> None:
    told: list[Run] = []
    run = of_this_file(exploding_when_profiled, tmp_path / "t.json", Observer(on_measured=told.append), steps=9)
    assert sure(run.failure).phase == "measure"
    assert told == []
    assert list(tmp_path.iterdir()) == []


# --- the order of things, on a device that is none --------------------------------------------------------


class Log(list[str]):
    def phase(self, name: str) -> Phase:
        return Phase(name=name, run=lambda: self.append(name))

    def device(self, kind: str) -> Any:
        return SimpleNamespace(torch_device=torch.device(kind), synchronize=lambda: self.append("synchronize"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(f"<{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append(">"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: log.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: log.append("stop"))
    return log


def recorded(log: Log, trace: Path, phases: list[Phase], kind: str = "cpu") -> tuple[str, ...]:
    spec = resolve_step({"model": "tiny"})
    profiler = StepProfiler(spec, log.device(kind), num_steps=2, trace=trace)
    return profiler.record(WholeStep(phases=phases), lambda iteration: log.append(f"step {iteration}"))


def test_nothing_waits_between_the_steps(log: Log, tmp_path: Path) -> None:
    recorded(log, tmp_path / "trace.json", [log.phase("forward"), log.phase("backward")])
    step = ["forward", "backward"]
    assert log == ["synchronize", *step, *step, "step 0", *step, "step 1", "synchronize"]


STEP_IN_NVTX = ["<step", "<forward", "forward", ">", "<backward", "backward", ">", ">"]


def test_under_someone_elses_nsys_there_is_no_torch_profiler(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1234")
    monkeypatch.setattr(under_test, "profile", None)
    (note,) = recorded(log, tmp_path / "trace.json", [log.phase("forward"), log.phase("backward")], "cuda")
    assert note.startswith("profile: ")
    assert "import-trace" in note
    warmup = ["<warmup step", *STEP_IN_NVTX[1:], "synchronize"]
    assert log == [*warmup, "start", *STEP_IN_NVTX, "step 0", *STEP_IN_NVTX, "step 1", "synchronize", "stop"]
    assert list(tmp_path.iterdir()) == []


def test_nsys_leaves_the_cpu_to_torch(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1234")
    assert recorded(log, tmp_path / "trace.json", [log.phase("forward")], "cpu") == ()
    assert len(top_ranges(tmp_path / "trace.json", "step")) == 2


def test_a_step_that_fails_under_nsys_ends_the_recording(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1234")

    def fail() -> None:
        if "start" in log:
            explode()

    with pytest.raises(ZeroDivisionError):
        recorded(log, tmp_path / "trace.json", [Phase(name="forward", run=fail)], "cuda")
    assert log[-1] == "stop"
    assert log.count(">") == sum(entry.startswith("<") for entry in log)


def test_a_run_may_lack_its_profile_where_nsys_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    assert not is_recorded_elsewhere(make_run())
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1234")
    assert is_recorded_elsewhere(make_run())
    assert not is_recorded_elsewhere(out_of_memory())


def test_a_trace_that_cannot_be_read_is_kept_and_so_is_the_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(task: StepTask, **how: object) -> Run:
        Path(sure(task.trace)).write_text("never a trace")
        return make_run()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steplab.lab.profiling.measure_in_child", measured)
    with pytest.raises(SteplabError, match=r"steplab-trace-.*, and the timing is in record") as error:
        profile("tiny", store=tmp_path / "store.db")
    [kept] = tmp_path.glob("steplab-trace-*")
    assert str(kept) in str(error.value)
    assert kept.read_text() == "never a trace"
    assert sure(load(store=tmp_path / "store.db")).id in str(error.value)


def test_the_ranges_of_a_step_to_be_compiled_are_none(log: Log, tmp_path: Path) -> None:
    profiling = partial(StepProfiler, num_steps=1, trace=tmp_path / "trace.json")
    eager, compiled = (
        profiling(resolve_step({"model": "tiny", "compile": mode}), log.device("cpu")).span
        for mode in ("off", "default")
    )
    assert compiled is no_span
    assert eager is not no_span
