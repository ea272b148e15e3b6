"""Tune flash_triton in a process of its own, which has others under it."""

import msgspec

from steplab.errors import SteplabError
from steplab.measurement.launch import Listener, OnProgress, converse
from steplab.measurement.messages import Request
from steplab.records.attention_tuning import AttentionTuning
from steplab.specs.attention_tuning import TuningStudy


class _TuningListener(Listener):
    """Hears the one answer."""

    def __init__(self, on_progress: OnProgress) -> None:
        super().__init__(on_progress)
        self.tuning: AttentionTuning | None = None

    def hear(self, kind: str, value: msgspec.Raw) -> None:
        """One message."""
        if kind == "tuned":
            self.tuning = msgspec.json.decode(value, type=AttentionTuning)
        else:
            super().hear(kind, value)

    @property
    def answered(self) -> bool:
        """Whether the child has said its last word."""
        return self.tuning is not None or super().answered


def tuning_in_child(study: TuningStudy, on_progress: OnProgress = lambda progress: None) -> AttentionTuning:
    """Measure the candidates. Raises UserError where there is no GPU for it, SteplabError where the process dies."""
    listener = _TuningListener(on_progress)
    failure = converse(Request(tuning=study), listener, None)
    if listener.tuning is None:
        raise SteplabError(f"attention could not be tuned: {failure.message if failure else 'no answer'}")
    return listener.tuning
