"""`horovod.keras.callbacks`."""

from farandole.horovod.tensorflow.keras.callbacks import *  # noqa: F403
from farandole.horovod.tensorflow.keras.callbacks import __all__  # noqa: F401
