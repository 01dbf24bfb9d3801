"""Horovod's interface over this package's ranks: scripts written for Horovod 0.28 run as they are.

    import farandole.horovod.torch as hvd         # was: import horovod.torch as hvd

or without any change: `python -m farandole.horovod.shim script.py`.

`torch/` is the interface for PyTorch, `tensorflow/` and `keras/` are those for TensorFlow 2 and Keras 3, `common/` is
what does not depend on a framework, and `engine/` the queue of named requests: which of them are ready on all ranks,
and the collectives that carry them out.
"""
