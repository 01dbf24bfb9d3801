"""The C core, the one part of the build that pyproject.toml cannot say.

`farandole.native._core` is an ordinary shared library that Python opens with ctypes: it includes no
Python.h and so builds where the headers of Python are missing.  It is optional: where it cannot be
compiled the package installs without it, and the runtime uses Gloo.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "farandole.native._core",
            sources=sorted(glob("farandole/native/*.c")),
            depends=sorted(glob("farandole/native/*.h") + glob("farandole/native/*.inc")),
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fno-math-errno",
                "-ffp-contract=off",
                "-fvisibility=hidden",
                "-pthread",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
