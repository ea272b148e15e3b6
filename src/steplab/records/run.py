"""One measurement of one step: what was asked, where it ran, what came out."""

from dataclasses import dataclass
from typing import Literal

from steplab.records.memory import Memory
from steplab.records.memory_profile import MemoryProfile
from steplab.records.profile import Profile
from steplab.records.ranks import RankSamples
from steplab.records.record import StepRecord
from steplab.records.timing import Timing

RUN_SCHEMA = "steplab.run/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of the model as it was built, from which its FLOPs follow."""

    num_parameters: int
    """All parameters, each tied one counted once."""
    num_embedding_parameters: int | None = None
    """Parameters of the token embedding that are only looked up (none if tied to the head); None: not known."""
    num_layers: int | None = None
    """Attention layers; None: not known."""
    attention_width: int | None = None
    """Query heads x head dimension; None: not known."""
    counted_flops: float | None = None
    """FLOPs of one step of a user's own model in one process, counted by torch's FlopCounterMode as it ran (matmuls,
    convolutions and attention, nothing elementwise); None for the models whose count has a closed form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """A share of the device's dense peak, stored as what it is made of."""

    kind: Literal["mfu", "hfu"]
    """mfu counts the FLOPs the model needs (recomputation excluded), hfu those the implementation executes."""
    convention: str
    """How attention was counted: causal, full or params; as_executed for hfu."""
    flops: float
    """FLOPs a step under that convention, of all devices together."""
    dtype: str
    """Data type of the matmuls, whose peak is meant."""
    peak_flops_per_s: float | None
    """Dense peak of one device in that type; None: not known."""
    peak_source: str
    """Where the peak comes from, or why there is none."""
    value: float | None
    """flops / median step time / (peak x num_devices); None without a peak."""
    num_devices: int = 1
    """Devices that did those FLOPs together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(StepRecord):
    """A measurement of one step."""

    tokens_per_step: int | None = None
    """Tokens of one step, of all processes together; None if the user's loop did not say."""
    model: ModelFacts | None = None
    """The model as built; None for a user's own loop or a failure before the build."""
    timing: Timing | None = None
    """Raw samples, of several processes those of the first; None for a failure."""
    memory: Memory | None = None
    """Peaks, of several processes those of the first; None for a failure."""
    ranks: tuple[RankSamples, ...] = ()
    """What each of several processes measured, in the order of ranks; empty for a single one."""
    profile: Profile | None = None
    """Where the time of some steps went, seen by a profiler after all timing was done; None if none was asked for."""
    memory_profile: MemoryProfile | None = None
    """What the memory of one step was made of, watched after all timing was done; None if that was not asked for."""
    utilizations: tuple[Utilization, ...] = ()
    """MFU under each convention that applies, and HFU."""
    schema: str = RUN_SCHEMA
    """Format of this record."""

    @property
    def device_name(self) -> str | None:
        """What the device is called: by the environment, or, for an imported trace or snapshot, by that."""
        if self.environment:
            return self.environment.device.name
        seen = self.profile or self.memory_profile
        return seen.device_name if seen else None
