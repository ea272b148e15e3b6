"""The record of one measured step: spec, environment and results, for each process if several."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from steplab.errors import SteplabError
from steplab.records.memory import Memory, PeakMemory
from steplab.records.memory_profile import MemoryProfile
from steplab.records.profile import PHASES, Profile, TracedRanks
from steplab.records.record import Positive, Problem, StepRecord, known, numbered
from steplab.records.timing import PhaseSamples, Timing, Turns, find_phase, measured_problems, timing_problems
from steplab.stats import median_interval
from steplab.units import format_share, format_time

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSamples:
    """Times and memory of one rank; sample i is from the same step on every rank."""

    rank: int
    host: str
    device_name: str
    back_to_back: tuple[PhaseSamples, ...]
    """Samples per phase, including `step`, without synchronisation between steps."""
    peaks: tuple[PeakMemory, ...] = ()
    host_peak_bytes: int | None = None
    """Largest resident set of the rank's process; None: unknown."""

    def phase(self, name: str) -> PhaseSamples | None:
        return find_phase(self.back_to_back, name)

    def peak(self, phase: str) -> PeakMemory | None:
        return next((peak for peak in self.peaks if peak.phase == phase), None)


STEP_PHASES = ("step", "pipeline", *PHASES)
"""Timed phases: the whole step, a pipeline's forward and backward together, and PHASES."""
NOT_FINITE = "weights became infinite or NaN"
"""First words of the note on training that diverged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of the built model, for counting FLOPs."""

    num_parameters: int
    """Tied parameters count once."""
    num_embedding_parameters: int | None = None
    """Parameters of token embeddings that take part in no matmul (0 if tied to the head); None: unknown."""
    num_layers: int | None = None
    attention_width: int | None = None
    """Query heads times head dimension; None: unknown."""
    is_causal: bool = True
    num_active_parameters: int | None = None
    """Parameters that one token uses in a mixture of experts; None: all."""
    counted_flops: float | None = None
    """Executed FLOPs per step of a user's model in one process (torch's FlopCounterMode: matmuls, convolutions,
    attention). None: compiled, or a formula is used.
    """
    needed_flops: float | None = None
    """FLOPs that a step needs: three times forward, at most those executed; compiled models count as eager. None: not
    counted.
    """

    @property
    def is_counted(self) -> bool:
        """True if FLOPs must be counted while running: sizes for a formula are missing."""
        return self.num_layers is None or self.attention_width is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """MFU or HFU, with its inputs."""

    kind: Literal["mfu", "hfu"]
    """mfu: FLOPs that the model needs, without recomputation. hfu: FLOPs executed."""
    convention: str
    """How FLOPs are counted. mfu: causal, full or params; counted (three times torch's forward count) for your own
    model; given (by you) for a loop. hfu: as_executed.
    """
    flops: float
    """FLOPs per step, summed over devices."""
    dtype: str
    """Data type of the matmuls and of the peak."""
    peak_flops_per_s: float | None
    """Dense peak of one device in `dtype`; None: unknown."""
    peak_source: str
    """Source of the peak, or the reason why there is none."""
    value: float | None
    """flops / median step time / (peak x num_devices); None without a peak."""
    num_devices: Positive = 1

    @property
    def label(self) -> str:
        """Name in tables, such as MFU (causal)."""
        return f"{self.kind.upper()} ({self.convention.replace('_', ' ')})"

    @property
    def exceeds_peak(self) -> bool:
        """True above 100 %: the stated peak is too low, or the convention counts too many FLOPs."""
        return self.value is not None and self.value > 1


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Run(StepRecord):
    """Measurement of one step."""

    tokens_per_step: int | None = None
    """Tokens per step, summed over processes; None: your loop did not state them."""
    model: ModelFacts | None = None
    """Sizes of the built model; None for your own loop, or if building failed."""
    timing: Timing | None = None
    """Raw times, of rank 0 if several; None after a failure."""
    memory: Memory | None = None
    """Peak memory, of rank 0 if several; None after a failure."""
    ranks: tuple[RankSamples, ...] = ()
    """Measurements of each process, by rank; empty for one process."""
    profile: Profile | None = None
    """Profile of steps after all timing; None: not requested, or failed."""
    traced_ranks: TracedRanks | None = None
    """Comparison of all ranks' imported traces (`profile` has the first's); None for one trace."""
    memory_profile: MemoryProfile | None = None
    """Memory by category of a step after all timing; None: not requested, or failed."""
    utilizations: tuple[Utilization, ...] = ()
    """MFU under each applicable convention, and HFU."""
    turns: Turns | None = None
    """Order of the measured steps among other runs' steps; None: no alternation."""
    schema: str = "steplab.run/1"

    @property
    def device_name(self) -> str | None:
        """Device name from the environment, trace or snapshot; None: unknown."""
        if self.environment:
            return self.environment.device.name
        seen = self.profile or self.memory_profile
        return seen.device_name if seen else None

    @property
    def samples_s(self) -> tuple[float, ...]:
        """Seconds of each measured step; empty without timing."""
        step = self.timing.phase("step") if self.timing else None
        return step.best_s if step else ()

    @property
    def median_s(self) -> float | None:
        """Median seconds of a step; None without timing."""
        return self.phase_s("step")

    def phase_s(self, name: str) -> float | None:
        """Median seconds of a phase, without synchronisation; None: not timed."""
        samples = self.timing.phase(name) if self.timing else None
        return median(samples.best_s) if samples and samples.best_s else None

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """95 % interval of the median step seconds (stats.median_interval); None below six samples."""
        return median_interval(self.samples_s)

    @property
    def peak(self) -> PeakMemory | None:
        """Peak memory of a step; None: not measured, or the allocator keeps no counts."""
        return self.memory.peak("step") if self.memory else None

    @property
    def mfu(self) -> float | None:
        """MFU under `causal`, or else the first known convention."""
        used = self.utilization("mfu", "causal")
        return used.value if used else None

    def utilization(self, kind: str, convention: str) -> Utilization | None:
        """Utilization under this convention, else the first of the kind; None if there is none."""
        of_kind = [u for u in self.utilizations if u.kind == kind]
        exact = [u for u in of_kind if u.convention == convention]
        return next(iter(exact or of_kind), None)

    def to_frame(self) -> "DataFrame":
        """Measured steps as a pandas DataFrame: a row per step, a column per phase, as `forward_s`.

        A phase that some steps skip has NaN in its last rows. Raises SteplabError without pandas.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise SteplabError("to_frame() needs pandas; install it with `pip install pandas`") from error
        phases = self.timing.back_to_back if self.timing else ()
        return pd.DataFrame({f"{phase.phase.replace(' ', '_')}_s": pd.Series(phase.best_s) for phase in phases})

    def in_short(self) -> Iterator[str]:
        yield from StepRecord.in_short(self)
        if self.median_s is not None:
            low, high = self.interval_s or (min(self.samples_s), max(self.samples_s))
            between = f"{'95 % interval' if self.interval_s else 'range'} {format_time(low)} to {format_time(high)}"
            yield f"{format_time(self.median_s)} a step ({between}, n = {len(self.samples_s)})"
        if self.mfu is not None:
            yield f"MFU {format_share(self.mfu)}"

    def problems(self) -> Iterator[Problem]:
        if self.timing:
            yield from timing_problems(self.timing, in_each_step=self.spec is not None)
            step = self.timing.phase("step")
            if self.turns and step and self.turns.num_steps != len(step.best_s):
                yield ".turns", f"has other than the {len(step.best_s)} steps of .timing"
            for index, phase in enumerate(self.timing.back_to_back if self.spec else ()):
                yield from known(f".timing.back_to_back[{index}].phase", phase.phase, STEP_PHASES)
        yield from numbered(
            ".ranks", [rank.rank for rank in self.ranks], self.spec.layout.world_size if self.spec else None
        )
        first = self.ranks[0].phase("step") if self.ranks else None
        for index, rank in enumerate(self.ranks):
            path, step = f".ranks[{index}].back_to_back", rank.phase("step")
            yield from measured_problems(path, rank.back_to_back, in_each_step=self.spec is not None)
            if first and step and len(step.best_s) != len(first.best_s):
                yield path, f"has {len(step.best_s)} steps, but rank 0 has {len(first.best_s)}"
