import dataclasses

from tests.runs import ENVIRONMENT, make_run, out_of_memory, steady

from steplab.records import numerics
from steplab.records.failure import Failure
from steplab.records.record import Record
from steplab.specs.resolve import resolve_step

NOTHING = numerics.Elements(
    num_elements=100,
    num_inf=0,
    num_nan=0,
    num_zero=0,
    num_subnormal=0,
    num_overflowed=0,
    num_underflowed=0,
    num_below_range=0,
    largest=2.0,
    smallest=0.5,
)
SOME = dataclasses.replace(
    NOTHING, num_inf=3, num_zero=9, num_subnormal=20, num_overflowed=3, num_underflowed=7, num_below_range=5
)


def layer(name: str, output: str = "float16", gradients: numerics.Elements = NOTHING) -> numerics.ModuleAudit:
    return numerics.ModuleAudit(
        module=name,
        kind="Linear",
        leaf=True,
        parameters=("float32",),
        inputs=("float32",),
        outputs=(output,),
        gradients=("float32",),
        output_gradients=(output,),
        output_elements=NOTHING,
        gradient_elements=NOTHING,
        output_gradient_elements=gradients,
    )


def product(name: str, phase: str, calls: int) -> numerics.MatmulAudit:
    low = ("float16", "float16")
    node = "MmBackward0" if phase == "backward" else None
    return numerics.MatmulAudit(
        module=name, phase=phase, op="aten::mm", node=node, inputs=low, outputs=("float16",), calls=calls
    )


AUDIT = numerics.Audit(
    loss_dtype="float32",
    loss=1.25,
    reference_loss=1.5,
    modules=(
        dataclasses.replace(layer(""), leaf=False, kind="Model", output_gradient_elements=SOME),
        *(layer(f"blocks.{index}.fc", gradients=SOME if index == 1 else NOTHING) for index in range(3)),
        layer("blocks.3.fc", output="float32"),
        layer("head<script>"),
    ),
    operations=(
        numerics.OperationAudit(op="linear", rule="low_precision", inputs=("float32",), outputs=("float16",), calls=5),
        numerics.OperationAudit(op="layer_norm", rule="fp32", inputs=("float16",), outputs=("float32",), calls=2),
        numerics.OperationAudit(
            op="cross_entropy",
            rule="fp32",
            inputs=("float16",),
            outputs=("float32",),
            calls=1,
            parts=("log_softmax", "nll_loss"),
        ),
    ),
    matmuls=(
        product("blocks.0.fc", "forward", 1),
        product("blocks.1.fc", "forward", 1),
        product("head", "backward", 2),
    ),
    gradient_exponents=((-30, 10), (-20, 30), (-3, 60)),
    loss_scaling=numerics.LossScaling(largest_gradient=0.125, suggested_scale=65536.0, unscaled=SOME, scaled=NOTHING),
)
SUM = numerics.Accumulation(
    accumulator="bfloat16",
    addend="bfloat16",
    cast=False,
    number=0.01,
    addend_value=0.010009765625,
    num_additions=1000,
    num_rounded=994,
    result=4.0,
    binades=(
        numerics.Binade(start=2.0, spacing=2.0**-6, num_additions=128, added=2.0**-6),
        numerics.Binade(start=4.0, spacing=2.0**-5, num_additions=650, added=0.0),
    ),
)


def record(precision: str = "fp16", **changes: object) -> numerics.Numerics:
    values: dict[str, object] = {
        "id": precision.encode().hex()[:12].ljust(12, "0"),
        "created_utc": "2026-11-21T07:30:00Z",
        "steplab_version": "0.1.0",
        "spec": resolve_step({"model": "toy", "precision": precision, "device": "cpu"}),
        "environment": ENVIRONMENT,
        "audit": AUDIT,
        "accumulations": (SUM,),
    }
    return numerics.Numerics(**(values | changes))  # type: ignore[arg-type]


FAILED = record("bf16", audit=None, failure=Failure(kind="out_of_memory", message="asked for 8.00 GiB more (audit)"))
RUNS = [make_run({"context": 128, "precision": p}) for p in ("fp32", "bf16", "fp16")]
RUNS.append(out_of_memory({"context": 128, "precision": "bf16_pure"}))


def told_records() -> list[Record]:
    study = "5e5e5e5e5e5e"
    runs = [dataclasses.replace(steady(run, number, ""), study=study) for number, run in enumerate(RUNS, start=1)]
    alone = record(spec=None, audit=None, id="5" * 12)
    failed = record("bf16_pure", id="f" * 12, audit=None, failure=FAILED.failure)
    audits = [record(), record("bf16"), record("tf32"), failed, alone]
    return [*runs, *(dataclasses.replace(audit, study=study) for audit in audits)]
