"""What is predicted of the changes of a step: by `plan time`, or of several processes `plan layout`, where it knows the
step and the GPU, otherwise by the findings on a profile; and by `plan memory`, whether they fit the GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steplab.costs.rates import Gpu, fitted_rates, gpu_named
from steplab.errors import SteplabError
from steplab.lab.explaining import explain
from steplab.measurement.progress import OnProgress
from steplab.plan.host import compile_s, on_the_host_of
from steplab.plan.layout.time import layout_step_s
from steplab.plan.memory import predict_memory
from steplab.plan.time import predict_step_time
from steplab.records.environment import Environment
from steplab.records.finding import Finding
from steplab.records.prediction import FitVerdict
from steplab.records.run import Run
from steplab.specs.attention_kernels import chosen_by_auto
from steplab.specs.changes import Change, changes_for
from steplab.specs.hardware import find_hardware
from steplab.specs.layout import SINGLE
from steplab.specs.step import StepSpec

_PROFILED_STEPS = 5
"""Timed steps of the run whose profile is explained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """The predicted gain of a change."""

    share: float
    """Share of the step that it saves; negative if it costs time."""
    source: str
    """What predicts it: the kind of a finding, `plan time` or `plan layout`."""


class Outlook:
    """What is known beforehand of the changes of a step."""

    def __init__(
        self,
        spec: StepSpec,
        store: Path | str | None,
        name: str,
        on_progress: OnProgress,
        on_change: Callable[[str], None],
        profile: Callable[..., Run],
        *,
        keep_precision: bool,
    ) -> None:
        """`spec` is the first step, which `profile` measures where nothing else predicts it; `on_change` is told that.
        With `keep_precision`, number formats stay as they are."""
        self._spec, self._store, self._name, self._keep_precision = spec, store, name, keep_precision
        self._on_progress, self._on_change, self._profile = on_progress, on_change, profile
        self._gpu: Gpu | None = None
        self._planned: dict[StepSpec, float | None] = {}
        self._rooms: dict[StepSpec, FitVerdict | None] = {}
        self._findings: Sequence[Finding] = ()
        self._step_s: float | None = None
        self._device_name, self._device_kind = "", "cpu"

    def look(self, environment: Environment | None, *, may_profile: bool) -> None:
        """Find out what there is to predict by, once the first step is built and its device is known; `may_profile`
        says whether there is time for a profile."""
        if environment is None:
            return
        self._device_kind, self._device_name = environment.device.kind, environment.device.name
        known = find_hardware(self._device_name)
        self._gpu = gpu_named(known.name) if known else None
        if self._planned_s(self._spec) is None and may_profile:
            self._explain()

    def see(self, run: Run) -> None:
        """Predict from now on by the pace of the host that a measured step shows."""
        if self._gpu is None or run.spec is None or self._planned_s(run.spec) is None:
            return
        gpu = on_the_host_of(run, self._gpu)
        if gpu is not self._gpu:
            self._gpu, self._planned = gpu, {}

    def changes(self, spec: StepSpec) -> list[Change]:
        """The changes that apply to a step, in the order in which they are tried where nothing else decides."""
        return changes_for(spec, self._device_kind, keep_precision=self._keep_precision)

    def recipe(self, spec: StepSpec) -> list[Change]:
        """Those of them that the recipe `fast` sets."""
        return [each for each in self.changes(spec) if each.is_fast(spec, self._device_kind)]

    def compile_s(self, spec: StepSpec) -> float:
        """Seconds that compiling a step takes, on an unknown device those of a host of known GPUs; 0 where the number
        of blocks is not known."""
        return compile_s(spec, (self._gpu.rates if self._gpu else fitted_rates()[0]).host)

    def meant(self, spec: StepSpec, field: str, value: str) -> str:
        """What a value of a field comes to on the device: what `auto` chooses. Two values may come to the same."""
        if (field, value) == ("reshard_after_forward", "auto"):
            return "always" if replace(spec, reshard_after_forward="auto").reshards else "never"
        if (field, value) != ("attention", "auto") or spec.model.shape is None:
            return value
        return chosen_by_auto(spec, spec.model.shape, self._device_name).implementation

    def promise(self, spec: StepSpec, change: Change) -> Promise | None:
        """The predicted gain of a change of a step; None: it is not known."""
        before_s = self._planned_s(spec)
        after_s = self._planned_s(change.made(spec)) if before_s else None
        if before_s and after_s:
            if spec.layout == SINGLE:
                return Promise(share=1 - after_s / before_s, source="plan time")
            # A plan of layouts does not know every choice; of one that it does not, both have the same time.
            return Promise(share=1 - after_s / before_s, source="plan layout") if after_s != before_s else None
        for finding in self._findings:
            if finding.fields == {change.field: change.value} and finding.saves_s is not None and self._step_s:
                return Promise(share=finding.saves_s / self._step_s, source=finding.kind)
        return None

    def room(self, spec: StepSpec) -> FitVerdict | None:
        """Whether a step is predicted to fit the GPU; None: it is not known."""
        if self._gpu is None:
            return None
        if spec not in self._rooms:
            try:  # not traced, which would run others' models in this process: a lower bound is enough here
                cards = predict_memory(_of_two_micro_steps(spec), device=self._device_name).cards
            except SteplabError:
                cards = ()
            self._rooms[spec] = next((card.verdict for card in cards if card.gpu == self._gpu.name), None)
        return self._rooms[spec]

    def by_hand(self, best: Run | None) -> tuple[Finding, ...]:
        """The findings that no field of a step answers."""
        found = self._findings or (explain(best, store=self._store).findings if best and not best.failure else ())
        return tuple(finding for finding in found if not finding.fields)

    def _planned_s(self, spec: StepSpec) -> float | None:
        if spec not in self._planned:
            try:
                self._planned[spec] = _predicted_s(spec, self._gpu) if self._gpu else None
            except SteplabError:
                self._planned[spec] = None
        return self._planned[spec]

    def _explain(self) -> None:
        self._on_change("a profile of it, to explain")
        spec = replace(self._spec, steps=min(self._spec.steps, _PROFILED_STEPS))
        run = self._profile(spec, name=self._name, store=self._store, on_progress=self._on_progress)
        if run.failure is None:
            found = explain(run, store=self._store)
            self._findings, self._step_s = found.findings, found.step_s


def _predicted_s(spec: StepSpec, gpu: Gpu) -> float | None:
    """The predicted time of a step in seconds. Raises Unsupported for one that cannot be predicted."""
    return predict_step_time(spec, gpu).central_s if spec.layout == SINGLE else layout_step_s(spec, gpu)


def _of_two_micro_steps(spec: StepSpec) -> StepSpec:
    """The step with no more micro-steps than its peak depends on: from the second on each holds the same."""
    return replace(spec, accumulation=min(spec.accumulation, 2))
