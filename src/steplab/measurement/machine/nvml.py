"""Clocks, power limit and driver of one GPU through NVML (package nvidia-ml-py, extra `nvidia`).

The GPU is found by UUID: NVML counts all GPUs of the machine, torch only those that CUDA_VISIBLE_DEVICES lets
it see, so that an index means different cards to the two.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One look at a GPU; None for what it does not tell."""

    driver: str
    sm_clock_hz: float | None
    memory_clock_hz: float | None
    power_limit_w: float | None
    temperature_c: float | None


def read(uuid: str) -> Reading | str:
    """The GPU's state now, or in words why it cannot be read."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed (pip install 'steplab[nvidia]')"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML cannot be started: {error}"

    def ask(function, *arguments, scale: float):  # type: ignore[no-untyped-def]
        try:
            return function(handle, *arguments) * scale
        except pynvml.NVMLError:
            return None  # a card may lack one figure and tell the others

    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return Reading(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            sm_clock_hz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM, scale=1e6),
            memory_clock_hz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM, scale=1e6),
            power_limit_w=ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, scale=1e-3),
            temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU, scale=1.0),
        )
    except pynvml.NVMLError as error:
        return f"NVML does not know GPU {uuid}: {error}"
    finally:
        pynvml.nvmlShutdown()
