"""Predicted against measured step times."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeCheck:
    """A prediction and a measurement of the same step."""

    id: str
    gpu: str
    """Name of the GPU in hardware.toml, else in the record."""
    cell: str
    precision: str
    compiled: bool
    predicted_step_time_s: float | None = None
    """Central value; None: not predicted."""
    low_s: float | None = None
    """Lower end of the 90 % interval."""
    high_s: float | None = None
    """Upper end of the 90 % interval."""
    measured_step_time_s: float | None = None
    """Median of the measured steps; None: not measured."""
    predicted_peak_bytes: int | None = None
    """Predicted peak of allocated bytes; None: not predicted."""
    measured_peak_bytes: int | None = None
    """Measured peak of allocated bytes; None: not measured, or without what CUDA graphs of torch.compile keep."""
    fitted: bool = False
    """True if rates were fitted to it or to similar steps; otherwise it was held out, or came later."""
    device_waited: bool = False
    """True if the GPU may have waited for Python, judged by that CPU's pace in the same records; for other models, by
    the record and the prediction.
    """
    unsupported: str | None = None
    """Reason for a missing prediction; None: there is one."""

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1; None without both."""
        if self.predicted_step_time_s is None or not self.measured_step_time_s:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    @property
    def inside(self) -> bool | None:
        """True if the measured time lies in the interval; None without both."""
        if self.low_s is None or self.high_s is None or self.measured_step_time_s is None:
            return None
        return self.low_s <= self.measured_step_time_s <= self.high_s
