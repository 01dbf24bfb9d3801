"""Build the C core, and tag wheels that contain it.

`farandole/native/_core.so` is an ordinary shared library that Python opens with ctypes: it includes no Python.h, so it builds where
the headers of Python are missing, and one wheel serves every version of Python.  The core is optional: where no compiler is found the
package installs without it, and ranks communicate through Gloo.  FARANDOLE_REQUIRE_CORE=1 makes a failed compilation an error.
"""

import os
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]


class BuildCore(build_ext):
    """Names the library without the version of Python."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"


class Wheel(bdist_wheel):
    """Marks a wheel as independent of the version of Python, but not of the platform."""

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
setup(ext_modules=[core], cmdclass={"build_ext": BuildCore, "bdist_wheel": Wheel})
