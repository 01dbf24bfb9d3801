"""A module that replaces itself with `farandole.horovod` when it is imported.

`farandole.horovod.shim.install` adds the folder of this package to `sys.path`.  Processes spawned by
`multiprocessing` inherit `sys.path`, but not the shim's import hook.
"""

import sys

import farandole.horovod
from farandole.horovod import shim

shim.install()
sys.modules[__name__] = farandole.horovod
