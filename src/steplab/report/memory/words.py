from collections.abc import Iterator

from steplab import units
from steplab.records.memory_profile import MemoryProfile, tensor_bytes
from steplab.records.prediction import MemoryPrediction
from steplab.records.run import Run
from steplab.report.memory import figures
from steplab.report.memory.tables import derivation, is_compiled
from steplab.specs.step import AUTOCAST

_SOURCES = {
    "cuda allocator": "by the allocator's own history",
    "cpu allocator": "by torch's profiler, allocation by allocation",
}
_MOST_BLOCKS = 4


def exactly(num_bytes: int) -> str:
    return f"{units.format_bytes(num_bytes)} ({num_bytes:,} bytes)"


def heading(run: Run, profile: MemoryProfile) -> str:
    one = profile.num_events == 1
    events = "one allocation or release" if one else f"{profile.num_events:,} allocations and releases"
    if profile.source == "snapshot":
        parts = ["a snapshot" + (f", {profile.file}" if profile.file else ""), profile.device, profile.device_name]
        return ", ".join([*filter(None, parts), events])
    device = f" on {run.device_name}" if run.device_name else ""
    file = f", from {profile.file}" if profile.file else ""
    return f"one step{device}, {_SOURCES.get(profile.source, f'by {profile.source}')}{file}, {events}"


def peak_sentence(profile: MemoryProfile) -> str:
    return f"The peak is {exactly(profile.peak_bytes)}{_moment(profile)}."


def _moment(profile: MemoryProfile) -> str:
    """Example: ', reached in backward, in blocks.3.attention, when aten::bmm allocated at a.py:3 in f'."""
    places = [f"in {place}" for place in (profile.peak_phase, profile.peak_module) if place]
    where = ", ".join(places or [when(profile)])
    source = f"{profile.peak_source}()"  # a line in a function
    line = f" at {source}" if profile.peak_source else ""
    if profile.peak_op:
        return f", reached {where}, when {profile.peak_op} allocated{line}"
    # A compiled graph knows the source line of a backward pass.
    if line and profile.peak_phase == "backward" and profile.peak_module is None:
        return f", reached {where}, by the backward of {source}"
    return f", reached {where}" + (f", by an allocation{line}" if line else "")


def when(profile: MemoryProfile) -> str:
    if not profile.timeline.by_event:
        return f"{units.format_time(profile.peak_s)} into the history"
    return f"after {profile.peak_s:,.0f} of {profile.num_events:,} events"


def check_sentences(profile: MemoryProfile) -> Iterator[str]:
    counted, unwatched = profile.counted_peak_bytes, profile.unwatched_peak_bytes
    if counted is not None:
        text = "The allocator's own high-water mark over the recorded step "
        same = counted == profile.peak_bytes
        yield text + ("is the same, to the byte." if same else f"is {_against(counted, profile.peak_bytes)}.")
    if unwatched is not None and unwatched != (profile.peak_bytes if counted is None else counted):
        size = _against(unwatched, profile.peak_bytes)
        yield f"Over the steps timed back to back, which were not recorded, it was {size}."


def _against(size: int, other: int) -> str:
    off = size - other
    share = f" ({units.format_share(abs(off) / other)})" if other else ""
    return f"{exactly(size)}, {units.format_bytes(abs(off))} {'more' if off > 0 else 'less'}{share}" if off else "equal"


def around_sentences(profile: MemoryProfile) -> Iterator[str]:
    if profile.reserved_bytes is not None:
        beyond = profile.reserved_bytes - profile.peak_bytes
        more = f", {units.format_bytes(beyond)} more than the peak, as cache or in gaps" if beyond > 0 else ""
        yield f"The allocator held at most {units.format_bytes(profile.reserved_bytes)} of the device's memory{more}."
    if profile.outside_bytes is not None:
        yield (
            f"Outside the allocator the device had {units.format_bytes(profile.outside_bytes)} in use: the context, "
            "libraries, NCCL's buffers, other processes."
        )


def residual_sentence(run: Run, profile: MemoryProfile) -> str | None:
    """State size and formula of one residual-stream tensor, and the peak as a multiple of it.

    The tensor is the first block's input; None without a block, or if its dtype is unknown.
    """
    inputs = ((block.input_shape or (), block.input_dtype) for block in profile.blocks)
    shape, dtype = next((one for one in inputs if one[0] and tensor_bytes(*one)), ((), None))
    size = tensor_bytes(shape, dtype)
    if size is None:
        return None
    text = (
        f"One residual-stream tensor is {units.format_bytes(size)}: {derivation(shape, dtype, run.spec)} = {size:,} "
        f"bytes; the peak is {units.three_digits(profile.peak_bytes / size)} times that."
    )
    if run.spec and run.spec.precision in AUTOCAST and dtype == "float32":
        text += " Under autocast it stays float32: a low-precision tensor added to a float32 one gives float32."
    return text


def smaller_sentence(profile: MemoryProfile) -> str | None:
    asked = profile.peak_bytes - profile.at_peak.get("rounding", 0)
    size = asked - figures.allocated_bytes(made for made in profile.largest if made.at_peak)
    return f"Smaller allocations, not in the record, hold {units.format_bytes(size)}." if size > 0 else None


def saved_sentences(profile: MemoryProfile) -> Iterator[str]:
    total = figures.all_saved_bytes(profile)
    if total and profile.saved:
        compiled = all(map(is_compiled, profile.saved))
        whose = " A compiled graph saved it: its shape is known, its module is not." if compiled else ""
        yield f"Autograd saved {units.format_bytes(total)} for the backward pass.{whose}"
    yield from _block_sentences(profile)


def _block_sentences(profile: MemoryProfile) -> Iterator[str]:
    for block in profile.blocks[:_MOST_BLOCKS]:
        stream = block.input_bytes
        times = f", {units.three_digits(block.saved_bytes / stream)} times its input" if stream else ""
        saves = f"saves {units.format_bytes(block.saved_bytes)} of activations for backward{times}"
        saves = saves if block.saved_bytes else "saves no activations for backward"
        leaves = (
            f", and its backward pass leaves {units.format_bytes(block.gradient_bytes)} of parameters' gradients"
            if block.gradient_bytes is not None
            else ""
        )
        yield f"{block.module} {saves}{leaves}."
    others, beyond = profile.blocks[_MOST_BLOCKS:], profile.blocks_left_out
    count = len(others) + (beyond.count if beyond else 0)
    if count:
        saved = sum(block.saved_bytes for block in others) + (beyond.num_bytes if beyond else 0)
        kinds = "is 1 more kind" if count == 1 else f"are {count} more kinds"
        yield f"There {kinds} of block; one of each together save {units.format_bytes(saved)}."


def prediction_sentence(profile: MemoryProfile, prediction: MemoryPrediction) -> str:
    peak = figures.whole(profile, prediction)
    off = "" if peak.error is None else f", {figures.error_text(peak.error)} against the measured peak"
    off = ", equal to the measured" if peak.error == 0 else off
    told = f"The predicted peak is {exactly(peak.predicted_bytes or 0)}{off}, in {prediction.peak_phase}: "
    told += f"{prediction.peak_where}."
    if profile.source == "cpu allocator":
        told += (
            " It is for a CUDA device, without the workspaces of CUDA's libraries and the rounding of its allocator, "
            "which a CPU does not have; a CPU's operators save other tensors for backward, which the error includes."
        )
    return told
