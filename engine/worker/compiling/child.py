"""The process that compiles some kinds of kernels: a line of JSON on standard input says which."""

from __future__ import annotations

import json

from quire.engine.processes.child import end_with_parent, read_configuration
from quire.kernels.gpu.kinds import Kind, aim


def main() -> int:
    kinds = [Kind(module, name, said, tuple(gpu)) for module, name, said, gpu in json.loads(read_configuration())]
    end_with_parent()
    for kind in kinds:
        aim(kind.target)
        try:
            kind.compile()
        except Exception:  # its first launch will say why
            continue
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
