"""Process that reads kernel variants from stdin, as a line of JSON, and compiles them. On failure it exits with status
1, and stderr's last line is the first error.
"""

from __future__ import annotations

import json
import sys

from quire.engine.processes.child import end_with_parent, read_configuration
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.gpu.kernel_variant import KernelVariant, set_compile_target


def main() -> int:
    variants = [
        KernelVariant(module, name, specialization, tuple(gpu))
        for module, name, specialization, gpu in json.loads(read_configuration())
    ]
    end_with_parent()
    first_error = ""
    for variant in variants:
        set_compile_target(variant.target)
        try:
            variant.compile_variant()
        except Exception as error:
            first_error = first_error or f"{variant.name}: {describe_kernel_error(error)}"
    if first_error:
        print(first_error, file=sys.stderr)
    return 1 if first_error else 0


if __name__ == "__main__":
    raise SystemExit(main())
