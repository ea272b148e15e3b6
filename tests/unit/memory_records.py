"""Synthetic memory profiles: a Transformer step, every allocation and release in turn. The tape keeps plain sums, to
check reports.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from tests.runs import ENVIRONMENT, make_run, steady
from tests.sure import sure

from steplab.records.memory import Memory, PeakMemory
from steplab.records.memory_profile import (
    MEMORY_CATEGORIES,
    UNNAMED_CATEGORIES,
    Allocation,
    BlockMemory,
    LeftOut,
    MemoryPhase,
    MemoryProfile,
    MemoryTimeline,
    SavedTensors,
)
from steplab.records.prediction import MemoryPrediction, Term
from steplab.records.run import Run
from steplab.specs.model import TransformerShape
from steplab.specs.step import StepSpec

MIB = 1024**2
EVENT_S = 2e-4


class Tape:
    def __init__(self, categories: tuple[str, ...]) -> None:
        self.categories = categories
        self.now: Counter[str] = Counter()
        self.rows: list[tuple[int, ...]] = []
        self.causes: list[Allocation | None] = []
        self.phases: list[tuple[str, int, int]] = []
        self.made: list[tuple[int, Allocation]] = []
        self.events = 0
        self.phase: str | None = None

    def change(self, category: str, num_bytes: int, cause: Allocation | None = None) -> None:
        self.now[category] += num_bytes
        if self.phase is not None:
            self.rows.append(tuple(self.now[name] for name in self.categories))
            self.causes.append(cause)
            self.events += 1

    def make(self, category: str, shape: tuple[int, ...], dtype: str, **where: Any) -> int:
        size = prod(shape) * (2 if dtype == "bfloat16" else 4)
        block = -(-size // 512) * 512
        made = Allocation(requested_bytes=size, block_bytes=block, category=category, phase=self.phase, shape=shape,
                          dtype=dtype, **where)  # fmt: skip
        self.now["rounding"] += block - size
        self.change(category, size, made)
        alike = re.sub(r"\.\d+", ".*", made.module) if made.module else None
        self.made.append((len(self.rows) - 1, replace(made, module=alike)))
        return size

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        first, self.phase = len(self.rows), phase
        self.change(self.categories[0], 0)
        yield
        self.phases.append((phase, first, len(self.rows)))

    def profile(self, **fields: Any) -> MemoryProfile:
        totals = [sum(row) for row in self.rows]
        peak = totals.index(max(totals))
        cause = sure(self.causes[peak])
        row = dict(zip(self.categories, self.rows[peak], strict=True))
        values: dict[str, Any] = {
            "source": "cuda allocator",
            "peak_bytes": totals[peak],
            "at_peak": {name: size for name, size in row.items() if size},
            "peak_s": EVENT_S * peak,
            "peak_phase": next(name for name, first, end in self.phases if first <= peak < end),
            "peak_module": cause.module,
            "peak_op": cause.op,
            "peak_source": cause.source,
            "timeline": MemoryTimeline(
                time_s=tuple(EVENT_S * index for index in range(len(self.rows))),
                categories=self.categories,
                allocated_bytes=tuple(zip(*self.rows, strict=True)),
            ),
            "phases": tuple(
                MemoryPhase(name=name, start_s=EVENT_S * first, end_s=EVENT_S * end, peak_bytes=max(totals[first:end]))
                for name, first, end in self.phases
            ),
            "counted_peak_bytes": totals[peak],
            "unwatched_peak_bytes": totals[peak],
            "largest": self.largest(peak),
            "num_events": self.events,
        }
        return MemoryProfile(**(values | fields))

    def largest(self, peak: int) -> tuple[Allocation, ...]:
        alike = Counter(
            replace(made, at_peak=row == peak or (row < peak and made.category != "temporaries"))
            for row, made in self.made
        )
        groups = [replace(made, count=count) for made, count in alike.items()]
        ordered = sorted(groups, key=lambda made: (not made.at_peak, -made.block_bytes * made.count))
        return tuple(ordered[:24])


def _kept(spec: StepSpec, shape: TransformerShape) -> list[tuple[str, str, tuple[int, ...], str, str, str]]:
    tokens = (spec.batch, spec.context)
    wide, hidden = (*tokens, shape.d_model), (*tokens, shape.d_ff)
    scores = (spec.batch, shape.num_heads, spec.context, spec.context)
    low = "bfloat16" if spec.precision == "bf16" else "float32"
    line = "transformer.py:{} in forward".format
    kept: list[tuple[str, str, tuple[int, ...], str, str, str]]
    kept = [("attention_norm", "FusedRmsNormBackward0", wide, "float32", "aten::_fused_rms_norm", line(65))]
    kept += [(f"attention.{name}", "ViewBackward0", wide, low, "aten::mm", line(83)) for name in ("query", "key")]
    kept += [("attention.value", "MmBackward0", wide, low, "aten::mm", line(83))]
    kept += [("attention", "SoftmaxBackward0", scores, "float32", "aten::_softmax", "reference.py:31 in plain")]
    kept += [("attention", "BmmBackward0", scores, low, "aten::_to_copy", "reference.py:32 in plain")] * (
        low == "bfloat16"
    )
    kept += [("attention.output", "MmBackward0", wide, low, "aten::bmm", "reference.py:32 in plain")]
    kept += [("feed_forward_norm", "FusedRmsNormBackward0", wide, "float32", "aten::_fused_rms_norm", line(66))]
    kept += [("feed_forward.gate", "SiluBackward0", hidden, low, "aten::mm", line(102))]
    kept += [("feed_forward", "MulBackward0", hidden, low, "aten::silu", line(102))]
    kept += [("feed_forward.up", "MulBackward0", hidden, low, "aten::mm", line(102))]
    kept += [("feed_forward.down", "MmBackward0", hidden, low, "aten::mul", line(102))]
    return kept


def train_profile(spec: StepSpec, *, checkpointed: bool = False, **fields: Any) -> MemoryProfile:
    shape = sure(spec.model.shape)
    weights = [("query", shape.d_model, shape.d_model)] * 4 + [("up", shape.d_ff, shape.d_model)] * 3
    table = (shape.vocab_size, shape.d_model)
    num_parameters = shape.num_layers * sum(a * b for _, a, b in weights) + 2 * prod(table)
    low = spec.precision == "bf16"
    tape = Tape(MEMORY_CATEGORIES)
    tape.change("parameters", 4 * num_parameters)
    tape.change("optimizer_state", 8 * num_parameters)
    tape.change("inputs", 16 * spec.tokens)
    tape.change("workspaces", 32 * MIB)
    tape.change("rounding", 300 * 512)
    kept = _kept(spec, shape)
    stream = (spec.batch, spec.context, shape.d_model)
    blocks: list[list[int]] = []

    def run_block(index: int) -> list[int]:
        sizes = []
        for name, _, of, dtype, op, source in kept:
            where = {"module": f"blocks.{index}.{name}", "op": op, "source": source}
            sizes.append(tape.make("activations", of, dtype, **where))
            spare = tape.make("temporaries", of, "float32", **where)
            tape.change("temporaries", -spare)
        return sizes

    with tape.during("forward"):
        for index in range(shape.num_layers):
            if low:
                for _, a, b in weights:
                    tape.make("autocast_copies", (a, b), "bfloat16", op="aten::_to_copy")
            sizes = run_block(index)
            if checkpointed:
                tape.change("activations", -sum(sizes))
                sizes = [tape.make("activations", stream, "float32", module=f"blocks.{index}", op="aten::add")]
            blocks.append(sizes)
        logits = (spec.tokens, shape.vocab_size)
        head = tape.make("activations", logits, "bfloat16" if low else "float32", module="head", op="aten::mm",
                         source="transformer.py:52 in forward")  # fmt: skip
        loss = tape.make(
            "activations", logits, "float32", op="aten::_log_softmax", source="transformer.py:55 in forward"
        )
    with tape.during("backward"):
        spare = tape.make("temporaries", logits, "float32", op="aten::_log_softmax_backward_data")
        tape.change("activations", -head - loss)
        tape.make("gradients", table, "float32", op="aten::mm")
        tape.change("temporaries", -spare)
        for index in reversed(range(shape.num_layers)):
            again = run_block(index) if checkpointed else []
            for size in [*again, *blocks[index]]:
                spare = tape.make("temporaries", stream, "float32", op="aten::mm")
                tape.change("activations", -size)
                tape.change("temporaries", -spare)
            for _, a, b in weights:
                tape.make("gradients", (a, b), "float32", op="aten::mm")
                if low:
                    tape.change("autocast_copies", -2 * a * b)
        tape.make("gradients", table, "float32", op="aten::embedding_dense_backward")
    with tape.during("optimizer"):
        for _ in range(3):
            spare = tape.make("temporaries", table, "float32", op="aten::_fused_adamw_")
            tape.change("temporaries", -spare)
    of_blocks = Counter((f"blocks.*.{name}", node, of, dtype) for name, node, of, dtype, _, _ in kept)
    saved = [
        SavedTensors(module=module, op=node, shape=of, dtype=dtype, count=shape.num_layers * count,
                     stored_bytes=shape.num_layers * count * prod(of) * (2 if dtype == "bfloat16" else 4))
        for (module, node, of, dtype), count in of_blocks.items()
    ]  # fmt: skip
    if checkpointed:
        saved = [SavedTensors(module="blocks.*", op="CheckpointFunctionBackward", shape=stream, dtype="float32",
                              count=shape.num_layers, stored_bytes=shape.num_layers * prod(stream) * 4)]  # fmt: skip
    saved.append(SavedTensors(module="", op="LogSoftmaxBackward0", shape=logits, dtype="float32", count=1,
                              stored_bytes=prod(logits) * 4))  # fmt: skip
    values: dict[str, Any] = {
        "reserved_bytes": int(1.04 * max(map(sum, tape.rows))),
        "outside_bytes": 540 * MIB,
        "saved": tuple(sorted(saved, key=lambda tensors: -tensors.stored_bytes)),
        "blocks": (
            BlockMemory(module="blocks.0", saved_bytes=sum(blocks[0]), input_bytes=4 * prod(stream), input_shape=stream,
                        input_dtype="float32", gradient_bytes=4 * sum(a * b for _, a, b in weights)),
        ),
    }  # fmt: skip
    return tape.profile(**(values | fields))


def watched_run(fields: dict[str, object] | None = None, *, checkpointed: bool = False, **overrides: Any) -> Run:
    run = make_run(fields)
    profile = train_profile(sure(run.spec), checkpointed=checkpointed)
    assert profile.reserved_bytes is not None
    peaks = tuple(
        PeakMemory(phase=name, peak_allocated_bytes=size, peak_reserved_bytes=profile.reserved_bytes)
        for name, size in [*((phase.name, phase.peak_bytes) for phase in profile.phases), ("step", profile.peak_bytes)]
    )
    memory = Memory(peaks=peaks, total_bytes=150_000_000_000, host_peak_bytes=3 * 1024**3)
    return replace(run, memory=memory, memory_profile=profile, **overrides)


def imported_profile(**fields: Any) -> MemoryProfile:
    tape = Tape(UNNAMED_CATEGORIES)
    tape.change("before", 900 * MIB)
    with tape.during("any"):
        sizes = []
        for index in range(300):
            sizes.append(tape.make("during", (1000 + 37 * (index % 11), 999), "float32",
                                   source=f"train.py:{40 + index % 7} in step"))  # fmt: skip
            if index % 3 == 2:
                tape.change("during", -sizes.pop(len(sizes) // 2))
    unnamed = [replace(made, phase=None, shape=None, dtype=None) for made in tape.profile().largest]
    timeline = replace(tape.profile().timeline, time_s=tuple(range(len(tape.rows))), by_event=True)
    values: dict[str, Any] = {
        "source": "snapshot",
        "timeline": timeline,
        "peak_s": tape.profile().peak_s / EVENT_S,
        "phases": (),
        "peak_phase": None,
        "largest": tuple(unnamed),
        "counted_peak_bytes": None,
        "unwatched_peak_bytes": None,
        "reserved_bytes": 1400 * MIB,
        "device": "cuda:0",
        "file": "snapshot.pickle",
        "notes": ("the history begins with 900 MiB allocated: who made them is not in the file",),
    }
    return tape.profile(**(values | fields))


def imported_snapshot(**overrides: Any) -> Run:
    values: dict[str, Any] = {
        "id": "feed00000001",
        "created_utc": "2026-11-22T09:00:00Z",
        "steplab_version": "0.1.0",
        "name": "their step",
        "memory_profile": imported_profile(),
        "notes": ("step time: a snapshot has none",),
    }
    return Run(**(values | overrides))


def cpu_run() -> Run:
    run = watched_run({"model": "tiny", "context": 64})
    device = replace(ENVIRONMENT.device, kind="cpu", name="Intel Xeon", memory_bytes=None)
    profile = replace(
        sure(run.memory_profile), source="cpu allocator", counted_peak_bytes=None, unwatched_peak_bytes=None,
        reserved_bytes=None, outside_bytes=None,
    )  # fmt: skip
    environment = replace(ENVIRONMENT, device=device)
    return replace(run, id="c9c9c9c9c9c9", environment=environment, memory=Memory(), memory_profile=profile)


def prediction_of(profile: MemoryProfile, factor: float = 0.99) -> MemoryPrediction:
    predicted = {name: round(factor * size) for name, size in profile.at_peak.items()}
    terms = tuple(Term(category=name, what=name, formula=f"{size}", num_bytes=size) for name, size in predicted.items())
    return MemoryPrediction(peak_bytes=sum(predicted.values()), at_peak=predicted, peak_phase="forward",
                            peak_where="loss, log-softmax", terms=terms, notes=("attention is plain",))  # fmt: skip


def told_runs() -> list[Run]:
    fp32, bf16 = watched_run({"context": 512}), watched_run({"context": 512, "precision": "bf16"})
    checkpointed = watched_run({"context": 512, "checkpointing": "full"}, checkpointed=True)
    seldom, compiled = watched_run({"context": 256}), watched_run({"context": 512, "precision": "bf16"})
    profile, kept = seldom.memory_profile, compiled.memory_profile
    assert profile is not None
    assert kept is not None
    assert compiled.spec is not None
    forward, *others = profile.phases
    seldom = replace(
        seldom,
        memory_profile=replace(
            profile,
            peak_phase=None, peak_module=None, peak_op=None, peak_source=None, peak_s=0.25,
            counted_peak_bytes=profile.peak_bytes + 512,
            unwatched_peak_bytes=profile.peak_bytes - MIB,
            phases=(replace(forward, peak_bytes=forward.peak_bytes - 3 * MIB), *others),
            saved_left_out=LeftOut(count=7, num_bytes=64 * MIB),
            blocks=tuple(BlockMemory(module=f"blocks.{n}", saved_bytes=n * MIB) for n in range(10)),
            blocks_left_out=LeftOut(count=2, num_bytes=30 * MIB),
            notes=("a note of the record",),
        ),
    )  # fmt: skip
    casts = tuple(
        SavedTensors(module="", op="CompiledFunctionBackward", shape=shape, dtype="bfloat16", count=1,
                     stored_bytes=mib * MIB) for shape, mib in (((2048, 3072), 300), ((3072, 768), 80))
    )  # fmt: skip
    compiled = replace(
        compiled, spec=replace(compiled.spec, compile="default"), memory_profile=replace(kept, saved=casts)
    )
    runs = [fp32, bf16, checkpointed, imported_snapshot(), cpu_run(), seldom, compiled]
    names = ("fp32", "bf16", "checkpointed", "snapshot", "cpu", "seldom", "compiled")
    return [steady(run, number, name) for number, (run, name) in enumerate(zip(runs, names, strict=True), start=1)]
