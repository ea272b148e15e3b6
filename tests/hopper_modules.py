"""Triton's output for the Hopper kernels at compute capability 9.0, without a GPU.

    python tests/hopper_modules.py [--table FILE]

Prints a line of JSON per module before instruction selection: name, products, and asynchronous products. --table
compiles kernels of every width and writes registers, stack and shared memory for this Triton. Not under
TRITON_INTERPRET=1.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from steplab.ops.attention import triton_tuning
from steplab.ops.attention.triton_hopper_backward import attention_backward
from steplab.ops.attention.triton_hopper_forward import attention_forward
from steplab.ops.attention.triton_hopper_tiles import CONSUMER_REGISTERS, LOADER_REGISTERS
from steplab.ops.attention.triton_tensors import columns

TARGET = GPUTarget("cuda", 90, 32)


def in_tiles(dtype: str, *block: int) -> str:
    swizzle = min(128, 2 * block[-1]) if len(block) == 4 else 0
    layout = gl.NVMMASharedLayout(swizzle, 32 if dtype == "fp32" else 16, len(block))
    return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"


def source_of(kernel: Any, types: dict[str, str], options: dict[str, Any]) -> GluonASTSource:
    of_pointers = {"lse_ptr": "*fp32", "shared_ptr": "*fp32", "tasks_ptr": "*i32", "turns_ptr": "*i32"}
    types = types | of_pointers | dict.fromkeys(options, "constexpr")
    signature = {n: types.get(n, "fp32" if n.startswith("scale") else "i32") for n in kernel.arg_names}
    pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    return GluonASTSource(kernel, signature, options, {(i,): [["tt.divisibility", 16]] for i in pointers})


def lowered(source: GluonASTSource) -> str:
    backend = make_backend(TARGET)
    chosen = backend.parse_options({"num_warps": 4, "enable_fp_fusion": True})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, chosen, source.language)
    implementation, modules = backend.get_codegen_implementation(chosen), backend.get_module_map()
    module = source.make_ir(TARGET, chosen, implementation, modules, context)
    return str(stages["ttgir"](module, {"target": TARGET, **chosen.__dict__}))


def compiled(source: GluonASTSource) -> dict[str, int]:
    made = triton.compile(source, target=TARGET, options={"num_warps": 4, "enable_fp_fusion": True})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(word.split(":", 1) for line in said.splitlines() if "REG:" in line for word in line.split())
    names = {"registers": "REG", "stack_bytes": "STACK"}
    return {name: int(usage[word]) for name, word in names.items()} | {"shared_bytes": int(made.metadata.shared)}


def in_two_parts(names: Sequence[str], rows: int, main: int, rest: int) -> tuple[dict[str, str], dict[str, Any]]:
    rests = [f"{name}_rest_tiles" for name in names]
    types = {f"{name}_tiles": in_tiles("bf16", 1, 1, rows, main) for name in names}
    if rest:
        return types | {name: in_tiles("bf16", 1, 1, rows, rest) for name in rests}, {}
    return types, dict.fromkeys(rests)


def registers(num_consumers: int) -> dict[str, int]:
    return {"CONSUMER_REGISTERS": CONSUMER_REGISTERS[num_consumers], "LOADER_REGISTERS": LOADER_REGISTERS}


def forward(head_dim: int, num_consumers: int, num_slots: int, keys: int = 128) -> GluonASTSource:
    parts = columns(head_dim)
    types = {name: in_tiles("bf16", 1, 1, 64, parts.box) for name in ("q_tiles", "o_tiles")}
    of_parts, no_rest = in_two_parts(("k", "v"), keys, parts.main, parts.rest)
    sizes = {"N": keys, "NUM_CONSUMERS": num_consumers, "MAIN": parts.main, "REST": parts.rest, "BOX": parts.box}
    options = {"CAUSAL": True, "NUM_SLOTS": num_slots, **no_rest, **sizes, **registers(num_consumers)}
    return source_of(attention_forward, types | of_parts, options)


def backward(head_dim: int, num_slots: int, *, grouped: bool, in_a_row: int = 1) -> GluonASTSource:
    parts = columns(head_dim)
    rows = 128 if parts.box == 64 else 64
    types, no_rest = in_two_parts(("q", "do"), rows, parts.main, parts.rest)
    types |= {name: in_tiles("bf16", 1, 1, 128, parts.box) for name in ("k_tiles", "v_tiles")}
    types |= {name: in_tiles("bf16", 1, 1, 64, parts.box) for name in ("dk_tiles", "dv_tiles")}
    types |= {"sums_tiles": in_tiles("fp32", 64, 32)}
    types |= {name: in_tiles("fp32", rows) for name in ("minus_lse_tiles", "minus_d_tiles")}
    sizes = {"M": rows, "MAIN": parts.main, "REST": parts.rest, "BOX": parts.box, "NUM_SLOTS": num_slots}
    options = {"CAUSAL": True, "GROUPED": grouped, "IN_A_ROW": in_a_row, **no_rest, **sizes, **registers(2)}
    return source_of(attention_backward, types, options)


def every_kernel() -> Iterator[tuple[str, int, GluonASTSource]]:
    for head_dim in (16, 32, 64, 80, 96, 128, 144, 160, 192, 256):
        rows = [
            triton_tuning._found(kernel, "a Hopper GPU", (9, 0), True, 16, head_dim, tokens)
            for kernel, tokens in (("forward", 512), ("forward", 65536), ("backward", 512))
        ]
        for row in (row for row in dict.fromkeys(rows) if row and row.variant == "hopper"):
            if row.kernel == "forward":
                consumers = row.queries // 64
                yield f"forward of {consumers} consumers", head_dim, forward(head_dim, consumers, row.stages, row.keys)
            else:
                yield "backward", head_dim, backward(head_dim, row.stages, grouped=False)
                shared = backward(head_dim, row.stages, grouped=True, in_a_row=2)
                yield "backward of shared keys", head_dim, shared


def write_table(path: Path) -> None:
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [row for row in rows if row["triton"] != triton.__version__]
    for kernel, head_dim, source in every_kernel():
        rows.append({"triton": triton.__version__, "kernel": kernel, "columns": head_dim} | compiled(source))
        print(json.dumps(rows[-1]), flush=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        write_table(Path(sys.argv[2]))
        return
    modules = (
        ("forward", forward(64, 3, 2)),
        ("forward", forward(80, 2, 2)),
        ("backward", backward(80, 2, grouped=True, in_a_row=2)),
        ("backward", backward(64, 2, grouped=False)),
    )
    for name, source in modules:
        products = [line for line in lowered(source).splitlines() if "ttng.warp_group_dot " in line]
        print(json.dumps([name, len(products), sum("isAsync = true" in line for line in products)]))


if __name__ == "__main__":
    main()
