"""`horovod.keras`, an alias of `horovod.tensorflow.keras`, which uses Keras 3."""

from __future__ import annotations

from farandole.horovod.tensorflow.keras import *  # noqa: F403
from farandole.horovod.tensorflow.keras import __all__  # noqa: F401
