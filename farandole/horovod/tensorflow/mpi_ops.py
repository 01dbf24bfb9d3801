"""The operations and queries, in the module where Horovod has them; scripts import from it."""

from farandole.horovod.common.abilities import *  # noqa: F403
from farandole.horovod.common.basics import *  # noqa: F403
from farandole.horovod.common.process_sets import ProcessSet, global_process_set  # noqa: F401
from farandole.horovod.tensorflow.functions import broadcast_  # noqa: F401
from farandole.horovod.tensorflow.operations import *  # noqa: F403
