"""Builds the C++ kernels when Quire is installed; everything else about the package is in pyproject.toml.

quire/kernels/cpu/build.py compiles them: for all instruction sets into a wheel, for this machine's beside their sources
where the install is an editable one. Where there is no compiler the install succeeds without the libraries, and Quire
serves on PyTorch's ops.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("quire/kernels/cpu")
_spec = importlib.util.spec_from_file_location("build_kernels", FOLDER / "build.py")
assert _spec is not None
assert _spec.loader is not None
kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernels)


class BuildKernels(build_ext):
    """Puts the libraries beside their sources (editable installs) or into the wheel."""

    def target(self) -> Path:
        return (Path() if self.inplace or self.editable_mode else Path(self.build_lib)) / FOLDER

    def run(self) -> None:
        cxx = kernels.find_compiler()
        if cxx is None:
            self.warn("no C++ compiler found: Quire will serve on PyTorch's ops, several times slower")
            return
        isas = kernels.isas_to_build(cxx) if self.inplace or self.editable_mode else kernels.ISAS
        for isa, failure in kernels.build_libraries_returning_errors(cxx, isas, self.target()).items():
            self.warn(f"kernels for {isa} were not built: {failure.splitlines()[0]}")

    def get_outputs(self) -> list[str]:
        return [str(path) for isa in kernels.ISAS if (path := self.target() / f"{isa}.so").exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(FOLDER / path.relative_to(kernels.HERE)) for path in kernels.source_files()]


class AnyPython(bdist_wheel):
    """The libraries depend on the platform, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("quire.kernels.cpu", sources=[])],  # marks the wheel as belonging to a platform
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
