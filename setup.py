"""Adds the CPU kernels to the package (everything else is in pyproject.toml).

Without a C++ compiler the package installs all the same: the gateway needs no kernels, and the engine says what is
missing when it is started.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """One shared library with a plain C interface, loaded with ctypes: no Python headers, any Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        place = Path(__file__).parent / "csrc/build.py"
        spec = importlib.util.spec_from_file_location("headrace_csrc_build", place)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        try:
            script.build(Path(self.get_ext_fullpath(ext.name)), place.parent.parent / "build/csrc")
        except script.BuildError as error:
            print(f"headrace: the CPU kernels are left out: {error}", file=sys.stderr)


setup(
    ext_modules=[Extension("headrace.kernels.native.libheadrace", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
