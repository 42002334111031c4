"""The process that compiles some kinds of kernels: a line of JSON on standard input says which. Where some do not
compile, it ends with status 1, and the last line on standard error says why the first does not."""

from __future__ import annotations

import json
import sys

from quire.engine.processes.child import end_with_parent, read_configuration
from quire.kernels.gpu.faults import fault
from quire.kernels.gpu.kinds import Kind, aim


def main() -> int:
    kinds = [Kind(module, name, said, tuple(gpu)) for module, name, said, gpu in json.loads(read_configuration())]
    end_with_parent()
    first = ""
    for kind in kinds:
        aim(kind.target)
        try:
            kind.compile()
        except Exception as error:
            first = first or f"{kind.name}: {fault(error)}"
    if first:
        print(first, file=sys.stderr)
    return 1 if first else 0


if __name__ == "__main__":
    raise SystemExit(main())
