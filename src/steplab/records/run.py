"""The record of one measured step: the spec, the environment and the results."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from steplab.errors import SteplabError
from steplab.records.memory import Memory, PeakMemory
from steplab.records.memory_profile import MemoryProfile
from steplab.records.problems import Problem, known, numbered
from steplab.records.profile import PHASES, Profile
from steplab.records.ranks import RankSamples
from steplab.records.record import StepRecord
from steplab.records.timing import Timing, measured_problems, timing_problems
from steplab.records.traced_ranks import TracedRanks
from steplab.records.turns import Turns
from steplab.stats import median_interval
from steplab.units import format_share, format_time

if TYPE_CHECKING:
    from pandas import DataFrame


STEP_PHASES = ("step", "pipeline", *PHASES)
"""The phases that a step can be timed by: the whole, a pipeline's passes in turn, and those of any other step."""
NOT_FINITE = "weights became infinite or NaN"
"""The beginning of a note of a run whose training did that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of the model as it was built, from which its FLOPs are computed."""

    num_parameters: int
    """Number of parameters, with tied parameters counted once."""
    num_embedding_parameters: int | None = None
    """Number of parameters of the token embedding that are only looked up (0 if it is tied to the head); None: not
    known."""
    num_layers: int | None = None
    """Number of attention layers; None: not known."""
    attention_width: int | None = None
    """Query heads x head dimension; None: not known."""
    is_causal: bool = True
    """Whether a token attends to earlier ones alone."""
    num_active_parameters: int | None = None
    """Number of parameters that one token uses, of a mixture of experts; None: all."""
    counted_flops: float | None = None
    """FLOPs of one step of a user's own model in one process, counted by torch's FlopCounterMode (matmuls, convolutions
    and attention, nothing elementwise); None for models whose count has a closed form, and for compiled ones."""
    needed_flops: float | None = None
    """FLOPs that such a model needs for that step: three times those of its forward pass, but no more than it executes.
    A compiled model has them too, counted as it runs eagerly. None where they were not counted."""

    @property
    def is_counted(self) -> bool:
        """Whether FLOPs are counted as the model runs, because no closed form has them."""
        return self.num_layers is None or self.attention_width is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """A share of the device's dense peak, with the figures that it is computed from."""

    kind: Literal["mfu", "hfu"]
    """mfu: FLOPs that the model needs, excluding recomputation. hfu: FLOPs that the implementation executes."""
    convention: str
    """Convention for the FLOPs of mfu: causal, full or params; counted (by torch in the forward pass, times three) for
    a user's own model; given (by the user) for a loop. as_executed for hfu."""
    flops: float
    """FLOPs per step under that convention, of all devices together."""
    dtype: str
    """Number format of the matmuls, to which the peak applies."""
    peak_flops_per_s: float | None
    """Dense peak of one device in that number format; None: not known."""
    peak_source: str
    """Source of the peak, or why there is none."""
    value: float | None
    """flops / median step time / (peak x num_devices); None without a peak."""
    num_devices: int = 1
    """Number of devices that executed those FLOPs together."""

    @property
    def label(self) -> str:
        """The share with its convention: MFU (causal)."""
        return f"{self.kind.upper()} ({self.convention.replace('_', ' ')})"

    @property
    def exceeds_peak(self) -> bool:
        """Whether the share is above 100 %, so that its peak is too low or its convention counts too much."""
        return self.value is not None and self.value > 1

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if self.num_devices < 1:
            yield ".num_devices", "must be at least 1, not 0"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Run(StepRecord):
    """A measurement of one step."""

    tokens_per_step: int | None = None
    """Tokens in one step of all processes together; None if the user's loop did not state it."""
    model: ModelFacts | None = None
    """The model as built; None for a user's own loop or a failure before the build."""
    timing: Timing | None = None
    """Raw timings, of the first rank if there are several; None for a failure."""
    memory: Memory | None = None
    """Peak memory, of the first rank if there are several; None for a failure."""
    ranks: tuple[RankSamples, ...] = ()
    """Measurements of each of several processes, in the order of ranks; empty for a single process."""
    profile: Profile | None = None
    """Profile of some steps, taken after all timing; None if it was not requested, or failed."""
    traced_ranks: TracedRanks | None = None
    """All ranks whose traces were imported, of which `profile` is that of the first; None for one trace."""
    memory_profile: MemoryProfile | None = None
    """Memory of one step by category, taken after all timing; None if it was not requested, or failed."""
    utilizations: tuple[Utilization, ...] = ()
    """MFU under each convention that applies, and HFU."""
    turns: Turns | None = None
    """The turns of the measured steps, if they alternated with the steps of other runs; None: they ran at once."""
    schema: str = "steplab.run/1"
    """Format of this record."""

    @property
    def device_name(self) -> str | None:
        """Name of the device, from the environment or from the imported trace or snapshot; None: not known."""
        if self.environment:
            return self.environment.device.name
        seen = self.profile or self.memory_profile
        return seen.device_name if seen else None

    @property
    def samples_s(self) -> tuple[float, ...]:
        """Times in seconds of the measured steps, which ran back to back; empty without a timing."""
        step = self.timing.phase("step") if self.timing else None
        return step.best_s if step else ()

    @property
    def median_s(self) -> float | None:
        """Median step time in seconds; None without a timing."""
        return self.phase_s("step")

    def phase_s(self, name: str) -> float | None:
        """Median time in seconds of a phase of the steps that ran back to back; None if it was not timed."""
        samples = self.timing.phase(name) if self.timing else None
        return median(samples.best_s) if samples and samples.best_s else None

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The 95 % interval in seconds of the median step time (stats.median_interval); None below six samples."""
        return median_interval(self.samples_s)

    @property
    def peak(self) -> PeakMemory | None:
        """Peak memory of a step; None if it was not measured, or this device's allocator does not count it."""
        return self.memory.peak("step") if self.memory else None

    @property
    def mfu(self) -> float | None:
        """MFU as a share of one, under the convention `causal` or, if that is not known, the first that is."""
        used = self.utilization("mfu", "causal")
        return used.value if used else None

    def utilization(self, kind: str, convention: str) -> Utilization | None:
        """The stored utilization of a kind under a convention; if it is missing, the first under another convention."""
        of_kind = [u for u in self.utilizations if u.kind == kind]
        exact = [u for u in of_kind if u.convention == convention]
        return next(iter(exact or of_kind), None)

    def to_frame(self) -> "DataFrame":
        """The measured steps as a pandas DataFrame: a row per step, a column `step_s`, `forward_s`, ... per phase.

        A phase of a loop of one's own that does not occur in each step has its samples in the first rows, and NaN
        below. Raises SteplabError where pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise SteplabError("to_frame() needs pandas; install it with `pip install pandas`") from error
        phases = self.timing.back_to_back if self.timing else ()
        return pd.DataFrame({f"{phase.phase.replace(' ', '_')}_s": pd.Series(phase.best_s) for phase in phases})

    def in_short(self) -> Iterator[str]:
        """Yield what the record says, in a few words each."""
        yield from StepRecord.in_short(self)
        if self.median_s is not None:
            low, high = self.interval_s or (min(self.samples_s), max(self.samples_s))
            between = f"{'95 % interval' if self.interval_s else 'range'} {format_time(low)} to {format_time(high)}"
            yield f"{format_time(self.median_s)} a step ({between}, n = {len(self.samples_s)})"
        if self.mfu is not None:
            yield f"MFU {format_share(self.mfu)}"

    def problems(self) -> Iterator[Problem]:
        """Yield what cannot be right (records.problems)."""
        if self.timing:
            yield from timing_problems(self.timing, in_each_step=self.spec is not None)
            step = self.timing.phase("step")
            if self.turns and step and self.turns.num_steps != len(step.best_s):
                yield ".turns", f"has other than the {len(step.best_s)} steps of .timing"
            for index, phase in enumerate(self.timing.back_to_back):
                if self.spec:
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
