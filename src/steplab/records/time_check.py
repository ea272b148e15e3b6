"""A predicted step time beside the measured one."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeCheck:
    """A prediction beside a measurement of the same step."""

    id: str
    """Id of the record."""
    gpu: str
    """GPU, by its name in the catalogue, or as the record calls it."""
    cell: str
    """The step in words."""
    precision: str
    """Number formats of the step."""
    compiled: bool
    """Whether the model was compiled."""
    predicted_step_time_s: float | None = None
    """Central value; None: not predicted."""
    low_s: float | None = None
    """Lower end of the 90 % interval."""
    high_s: float | None = None
    """Upper end of the 90 % interval."""
    measured_step_time_s: float | None = None
    """Median of the measured steps; None: not measured."""
    predicted_peak_bytes: int | None = None
    """Predicted peak of allocated memory; None: not predicted."""
    measured_peak_bytes: int | None = None
    """Measured peak of allocated memory; None: not measured, or without what CUDA graphs of torch.compile keep."""
    fitted: bool = False
    """Whether rates were fitted to it, or to others of its like; otherwise it was held out, or came later."""
    device_waited: bool = False
    """Whether the GPU may have waited for Python, by the pace of that machine's CPU in the same records; of a
    model that is not steplab's, by its record and the prediction."""
    unsupported: str | None = None
    """Why there is no prediction; None: there is one."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None without both."""
        if self.predicted_step_time_s is None or not self.measured_step_time_s:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measured time lies in the interval; None without both."""
        if self.low_s is None or self.high_s is None or self.measured_step_time_s is None:
            return None
        return self.low_s <= self.measured_step_time_s <= self.high_s
