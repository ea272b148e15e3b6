"""Memory of published steps' ranks beside what their sources state; their times are published_check.py's.

    python -m benchmarks.published_memory > table.md     (from the root of the checkout)

Other programs keep other state (16-bit weights with fp32 copies of which ranks share a part, or fp32 shards of weights
that are used in 16 bits alone), pad the vocabulary so that tp divides it, and before 2022 split no tokens between the
products of tensor parallelism. What a rank keeps is put in the place of ours here; the rest is predicted as steplab
would run it.
"""

import dataclasses
import sys
from collections.abc import Iterable

import msgspec
from benchmarks.published import PADDED_VOCABULARY, PublicLayout, PublicRow, read_rows, step_of

from steplab.errors import SteplabError
from steplab.plan.cards import outside_bytes
from steplab.plan.layout.memory import memory_by_rank
from steplab.plan.layout.model import own_model
from steplab.plan.layout.prediction import num_communicators
from steplab.plan.layout.ranks import rank_groups
from steplab.plan.layout.traffic import updated_elements
from steplab.plan.memory import workspace_of
from steplab.records.prediction import RankMemory
from steplab.specs.hardware import hardware_named
from steplab.specs.layout import Layout
from steplab.specs.model import ModelSpec
from steplab.specs.step import StepSpec
from steplab.units import GIB

WITH_WHOLE_TOKENS = ("bigscience",)
"""Sources from before sequence parallelism (Korthikanti et al. 2022): each rank of tp has all tokens between the
products."""
ALIKE_IN_MEMORY = {"H100 SXM 96GB HBM2e 500W": "H100 SXM"}
"""A GPU that is not in the catalogue: torch's memory depends on its architecture alone."""


def spec_of(row: PublicRow) -> StepSpec:
    """The row's step with its layout. Raises SteplabError where steplab has none such."""
    step, given = step_of(msgspec.structs.replace(row, layout=PublicLayout())), row.layout
    shape = step.model.shape
    assert shape is not None
    tp, pp = given.tp or 1, given.pp or 1
    padded = -(-shape.vocab_size // (PADDED_VOCABULARY * tp)) * PADDED_VOCABULARY * tp if tp > 1 else shape.vocab_size
    untied = dataclasses.replace(shape, head="untied", vocab_size=padded)  # a pipeline's ends have a copy each
    data = (row.gpus or 1) // tp // pp
    sharded = "fsdp" in str(given.shard)
    microbatches = row.grad_accum or 1
    return dataclasses.replace(
        step,
        model=ModelSpec(name=row.model.key or row.id, kind="transformer", shape=untied),
        layout=Layout(dp=1 if sharded else data, fsdp=data if sharded else 1, tp=tp, pp=pp),
        batch=step.batch * (microbatches if pp > 1 else 1),
        accumulation=1 if pp > 1 else microbatches,
        microbatches=microbatches if pp > 1 else None,
    )


def memory(rows: Iterable[PublicRow]) -> None:
    """Rows that state the memory of a rank."""
    print("| row | GPUs | layout | kind | stated | predicted | error |\n|---|---|---|---|---|---|---|")
    for published in rows:
        row, stated = published, published.measured.get("memory_gib") or published.measured.get("memory_gb")
        if not row.scored or not stated:
            continue
        row = msgspec.structs.replace(row, steplab_gpu=row.steplab_gpu or ALIKE_IN_MEMORY.get(row.gpu))
        try:
            spec = spec_of(row)
        except SteplabError as error:
            print(f"left out {row.id}: {error}", file=sys.stderr)
            continue
        kind = str(row.measured.get("memory_kind"))
        reserved = "reserved" in kind or "nvidia-smi" in kind
        name = hardware_named(row.card or row.gpu).device_names[0]
        splits = row.group not in WITH_WHOLE_TOKENS
        ranks = memory_by_rank(spec, workspace_of(name).value, sequence_parallel=splits)
        found = max(with_state(row, spec, rank, place, reserved=reserved) for place, rank in enumerate(ranks)) / GIB
        said = f"{stated:.1f} GiB | {found:.1f} GiB | {100 * (found / stated - 1):+.0f} %"
        print(f"| {row.id} | {row.gpus} | {spec.layout} | {kind} | {said} |")


def with_state(row: PublicRow, spec: StepSpec, rank: RankMemory, place: int, *, reserved: bool) -> float:
    """What a rank holds with the state that the source keeps in place of ours."""
    size = rank.reserved_bytes if reserved else rank.peak_bytes
    group = rank_groups(spec)[place]
    # torch's pipelines allocate the messages of all microbatches beforehand; these programs one of each at a time.
    messages = [term for term in rank.terms if term.what.endswith("from neighbours")]
    size -= sum(term.num_bytes * (term.count - rank.in_flight - 1) for term in messages)
    if "nvidia-smi" in str(row.measured.get("memory_kind")):
        size += outside_bytes(num_communicators(spec.layout), pipeline=spec.layout.pp > 1)
    kept = str(row.precision.get("parameters"))
    weights = updated_elements(spec, group, own_model(spec))
    ours = rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes
    if kept.startswith("fp32 shards"):
        return size - ours + 16 * weights / spec.layout.fsdp
    if "master" not in kept:
        return size
    # Weights in 16 bits are whole on each rank, so that none are gathered, as FSDP2 does with ours.
    size -= sum(term.num_bytes * term.count for term in rank.terms if term.what == "gathered weights")
    # Gradients that are summed in fp32 after a backward pass are all there in 16 bits besides until then
    # (nanotron, src/nanotron/optim/gradient_accumulator.py).
    gradients = 4 + 2 if "fp32" in str(row.precision.get("gradients")) else 2
    ranks = row.layout.shard_ranks or 1 if "zero1" in str(row.layout.shard) else 1
    return size - ours + weights * (2 + gradients + 12 / ranks)


if __name__ == "__main__":
    memory(read_rows())
