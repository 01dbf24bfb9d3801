"""Build the C core, add the troubleshooting page to the package, and tag wheels that contain the core.

`farandole/native/_core.so` is an ordinary shared library that Python loads with ctypes.  The library does not use Python.h, so it can be
built without Python's header files, and one wheel works with every supported version of Python.  The core is optional: without a
compiler, the package is installed without the core, and ranks communicate through Gloo.  With FARANDOLE_REQUIRE_CORE=1, a failed
compilation is an error.
"""

import os
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FLAGS = ["-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]


class BuildCore(build_ext):
    """Builds the library under a file name without the Python version."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"


class Package(build_py):
    """Adds the troubleshooting page to the package, for `farandole explain`."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file("docs/troubleshooting.md", os.path.join(self.build_lib, "farandole"))


class Wheel(bdist_wheel):
    """Builds a wheel whose tag names the platform, but no Python version."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


core = Extension(
    "farandole.native._core",
    sources=sorted(glob("farandole/native/*.c")),
    depends=sorted(glob("farandole/native/*.h") + glob("farandole/native/*.inc")),
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread", "-Wl,-z,defs"],
    optional="FARANDOLE_REQUIRE_CORE" not in os.environ,
)
setup(ext_modules=[core], cmdclass={"build_ext": BuildCore, "build_py": Package, "bdist_wheel": Wheel})
