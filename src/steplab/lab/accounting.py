"""Derive what a model takes at scale; this needs neither torch nor a GPU."""

from steplab.lab.measuring import asked_step
from steplab.plan.accounting import account, device_of, mesh_of
from steplab.records.accounting import Accounting
from steplab.specs.hardware import accelerator_named
from steplab.specs.hf_shape import shape_of
from steplab.specs.layout import parse_layout
from steplab.specs.step import StepSpec


def plan_accounting(
    spec: StepSpec | str | None = None,
    *,
    gpu: str = "TPU v5p",
    mesh: str = "fsdp=16,tp=4",
    axes: str | None = None,
    flops_per_s: float | None = None,
    axis_bytes_per_s: float | None = None,
    counted_in: str = "H100 SXM",
    **fields: object,
) -> Accounting:
    """What training a model takes at scale, by formula; see plan.accounting.

        steplab.plan_accounting("xxl", mesh="fsdp=16,tp=4").questions[0].answer

    Args:
        spec: with `fields`, as in `measure`; the model, the batch and the context are taken.
        gpu: the device of the mesh, a GPU or TPU of the catalogue; `flops_per_s` and `axis_bytes_per_s` replace its
            figures.
        mesh: devices along each axis; `axes`: axes of the network for each, on a torus.
        counted_in: the GPU in whose memories weights, gradients and optimizer state are counted.

    Raises UserError for an unknown device, and for a mesh that cannot be; Unsupported for a model whose parts are not
    known.
    """
    asked = asked_step("plan_accounting", spec, fields)
    shape = shape_of(asked.model, f"an accounting for {asked.model.label}")
    device = device_of(accelerator_named(gpu), flops_per_s=flops_per_s, axis_bytes_per_s=axis_bytes_per_s)
    return account(
        shape,
        model=asked.model.label,
        tokens=asked.tokens,
        mesh=mesh_of(device, parse_layout(mesh), None if axes is None else parse_layout(axes)),
        device=device,
        counted=device_of(accelerator_named(counted_in)),
    )
