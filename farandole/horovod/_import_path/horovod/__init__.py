"""Replace this module with `farandole.horovod`.

`farandole.horovod.shim.install` adds the folder of this package to `sys.path`.  Processes that multiprocessing spawns
inherit `sys.path`, but not the import hook of the shim.
"""

import sys

import farandole.horovod
from farandole.horovod import shim

shim.install()
sys.modules[__name__] = farandole.horovod
