"""The operations and queries, in the module where Horovod has them; scripts import from it."""

from farandole.horovod.torch import *  # noqa: F403
from farandole.horovod.torch import __all__ as __all__
