"""The benchmarks of attention: against its peers, and the two studies over sizes and lengths.

    python benchmarks/attention_study.py STORE [PIECE ...]          (from the root of the checkout, on one GPU)

A piece is a call of `steplab attention`, and a record in STORE; without any, all are run. Those of the long grid are
apart so that each ends within some minutes: compiling plain attention takes longer than timing it.
"""

import subprocess
import sys

DIMS = ("16", "32", "64", "128")
PIECES = {
    "peers": ["--grid", "peers", "--implementation", "sdpa_flash,flex,sdpa_cudnn,flash_triton", "--against", "flex"],
    **{f"study-{dim}": ["--grid", "study", "--dim", dim] for dim in DIMS},
    **{
        f"long-{dtype}-{dim}": ["--grid", "long", "--dtype", dtype, "--dim", dim]
        for dtype in ("bf16", "fp32")
        for dim in DIMS
    },
    "beyond": ["--grid", "long", "--dtype", "bf16", "--dim", "64", "--sequence", "131072,262144"],
}


def main() -> None:
    store, *named = sys.argv[1:]
    unknown = set(named) - set(PIECES)
    if unknown:
        sys.exit(f"no piece {sorted(unknown)[0]}; there are {', '.join(PIECES)}")
    for piece in named or PIECES:
        command = [sys.executable, "-m", "steplab", "attention", *PIECES[piece], "--name", piece, "--store", store]
        print(piece, flush=True)
        subprocess.run(command, check=False)  # a piece all of whose cells fail is a result as well


if __name__ == "__main__":
    main()
