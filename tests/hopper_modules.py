"""What Triton makes of the Hopper kernels for compute capability 9.0, as far as it needs no GPU and no assembler.

    python tests/hopper_modules.py

Prints a line of JSON for each: its name, its products, and those of them that are asynchronous. Not under
TRITON_INTERPRET=1, where Triton's own functions are for its interpreter.
"""

import json
from collections.abc import Sequence
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from steplab.ops.attention.triton_hopper_backward import attention_backward
from steplab.ops.attention.triton_hopper_forward import attention_forward


def in_tiles(dtype: str, *block: int) -> str:
    """The type of a tensor that the copy engine takes in such tiles, as Triton's signatures spell it."""
    swizzle = min(128, 2 * block[-1]) if len(block) == 4 else 0
    layout = gl.NVMMASharedLayout(swizzle, 32 if dtype == "fp32" else 16, len(block))
    return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"


def lowered(kernel: Any, types: dict[str, str], options: dict[str, Any]) -> str:
    """The module that Triton makes of a kernel for compute capability 9.0, before instructions are chosen."""
    target = GPUTarget("cuda", 90, 32)
    of_pointers = {"lse_ptr": "*fp32", "shared_ptr": "*fp32", "tasks_ptr": "*i32", "turns_ptr": "*i32"}
    types = types | of_pointers | dict.fromkeys(options, "constexpr")
    signature = {n: types.get(n, "fp32" if n.startswith("scale") else "i32") for n in kernel.arg_names}
    source = GluonASTSource(kernel, signature, options)
    backend = make_backend(target)
    chosen = backend.parse_options({"num_warps": 4})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, chosen, source.language)
    implementation, modules = backend.get_codegen_implementation(chosen), backend.get_module_map()
    module = source.make_ir(target, chosen, implementation, modules, context)
    return str(stages["ttgir"](module, {"target": target, **chosen.__dict__}))


REGISTERS = {"CONSUMER_REGISTERS": 160, "LOADER_REGISTERS": 24}


def in_two_parts(names: Sequence[str], rows: int, main: int, rest: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of tiles that come in two parts, and what stands for those of the rest where there is none."""
    rests = [f"{name}_rest_tiles" for name in names]
    types = {f"{name}_tiles": in_tiles("bf16", 1, 1, rows, main) for name in names}
    if rest:
        return types | {name: in_tiles("bf16", 1, 1, rows, rest) for name in rests}, {}
    return types, dict.fromkeys(rests)


def forward_lowered(main: int, rest: int, num_consumers: int) -> str:
    box = 64 if main + rest <= 64 else 128
    types = {name: in_tiles("bf16", 1, 1, 64, box) for name in ("q_tiles", "o_tiles")}
    of_parts, no_rest = in_two_parts(("k", "v"), 128, main, rest)
    types |= of_parts
    sizes = no_rest | {"N": 128, "NUM_CONSUMERS": num_consumers, "MAIN": main, "REST": rest, "BOX": box, "NUM_SLOTS": 2}
    return lowered(attention_forward, types, {"CAUSAL": True, **sizes, **REGISTERS})


def backward_lowered(main: int, rest: int, grouped: bool, in_a_row: int = 1) -> str:
    box, rows = (64, 128) if main + rest <= 64 else (128, 64)
    types, no_rest = in_two_parts(("q", "do"), rows, main, rest)
    types |= {name: in_tiles("bf16", 1, 1, 128, box) for name in ("k_tiles", "v_tiles")}
    types |= {name: in_tiles("bf16", 1, 1, 64, box) for name in ("dk_tiles", "dv_tiles")}
    types |= {"sums_tiles": in_tiles("fp32", 64, 32)}
    types |= {name: in_tiles("fp32", rows) for name in ("minus_lse_tiles", "minus_d_tiles")}
    sizes = {"M": rows, "MAIN": main, "REST": rest, "BOX": box, "NUM_SLOTS": 2}
    options = {"CAUSAL": True, "GROUPED": grouped, "IN_A_ROW": in_a_row, **no_rest, **sizes, **REGISTERS}
    return lowered(attention_backward, types, options)


def main() -> None:
    """Three consumers forward, and two for tiles in two parts; backward one turn a round, where heads share keys, and
    two: all that there is."""
    modules = (
        ("forward", forward_lowered(64, 0, 3)),
        ("forward", forward_lowered(64, 16, 2)),
        ("backward", backward_lowered(64, 16, grouped=True, in_a_row=2)),
        ("backward", backward_lowered(64, 0, grouped=False)),
    )
    for name, module in modules:
        products = [line for line in module.splitlines() if "ttng.warp_group_dot " in line]
        print(json.dumps([name, len(products), sum("isAsync = true" in line for line in products)]))


if __name__ == "__main__":
    main()
