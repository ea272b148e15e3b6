"""The benchmarks of attention: against its peers, over sizes, lengths and heads, and what `auto` chooses from.

    python -m benchmarks.attention_study STORE [--again] [PIECE ...]     (from the root of the checkout, on one GPU)

A piece is a call of `steplab attention`, and a record in STORE; without any, all are run. Those of the long grid are
apart so that each ends within some minutes: compiling plain attention takes longer than timing it. `long-own-…` are
their cells of flash_triton and of torch's choice alone, for kernels that changed. A piece that STORE has already is
measured with --again alone.
"""

import subprocess
import sys
from pathlib import Path

from steplab.store.database import Store

DIMS = ("16", "32", "64", "128")
PEERS = "sdpa_flash,flex,sdpa_cudnn,flash_triton,flash_attn_4"
PIECES = {
    "peers": ["--grid", "peers", "--implementation", PEERS, "--against", "flex"],
    "dims": ["--grid", str(Path(__file__).with_name("attention_dims.toml")), "--no-errors"],
    **{f"study-{dim}": ["--grid", "study", "--dim", dim] for dim in DIMS},
    **{
        f"long-{dtype}-{dim}": ["--grid", "long", "--dtype", dtype, "--dim", dim]
        for dtype in ("bf16", "fp32")
        for dim in DIMS
    },
    **{
        f"long-own-{dim}": [
            *("--grid", "long", "--dtype", "bf16", "--dim", dim),
            *("--implementation", "sdpa,flash_triton", "--compile", "off"),
        ]
        for dim in DIMS
    },
    **{
        f"choice-{dim}": ["--grid", "choice", "--dim", dim, "--pass", "both", "--no-errors", "--repeats", "10"]
        for dim in ("64", "80", "128")
    },
    "beyond": ["--grid", "long", "--dtype", "bf16", "--dim", "64", "--sequence", "131072,262144"],
}


def names_in(store: Path) -> set[str]:
    """Names of the benchmarks of attention that a store has."""
    if not store.exists():
        return set()
    with Store.open(store, write=False) as opened:
        return {str(row["name"]) for row in opened.rows(kind="attention")}


def main() -> None:
    again = "--again" in sys.argv
    store, *named = (word for word in sys.argv[1:] if word != "--again")
    unknown = set(named) - set(PIECES)
    if unknown:
        sys.exit(f"no piece {sorted(unknown)[0]}; there are {', '.join(PIECES)}")
    measured = set() if again else names_in(Path(store))
    for piece in named or PIECES:
        if piece in measured:
            print(f"{piece}: measured before", flush=True)
            continue
        command = [sys.executable, "-m", "steplab", "attention", *PIECES[piece], "--name", piece, "--store", store]
        print(piece, flush=True)
        subprocess.run(command, check=False)  # a piece all of whose cells fail is a result as well


if __name__ == "__main__":
    main()
