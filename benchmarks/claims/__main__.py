"""`python -m benchmarks.claims [NAME ...]`."""

from __future__ import annotations

import time

from benchmarks.claims.memory import preemption, sharing, waste
from benchmarks.claims.plan import plans
from benchmarks.claims.speed import batching, cache, chunks, grammars, guesses
from benchmarks.common.options import options

CLAIMS = {
    each.__name__: each for each in (waste, sharing, preemption, batching, cache, chunks, guesses, grammars, plans)
}


def main() -> None:
    names = {"nargs": "*", "choices": [[], *CLAIMS], "metavar": "NAME", "help": ", ".join(CLAIMS)}
    args = options(__doc__, {"names": names}, "python -m benchmarks.claims")
    print("| | measured | without the feature | claimed |\n|---|---|---|---|")
    began = time.perf_counter()
    for name in args.names or CLAIMS:
        for row in CLAIMS[name]():
            print(f"| {row.claim} | {row.measured} | {row.beside} | {row.said} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
