"""Horovod's interface on the ranks of farandole: scripts written for Horovod 0.28 run unchanged.

    import farandole.horovod.torch as hvd         # instead of: import horovod.torch as hvd

`python -m farandole.horovod.shim script.py` runs a script that imports `horovod`.

`torch/` is the interface for PyTorch, `tensorflow/` and `keras` are the interfaces for TensorFlow 2 and Keras 3.  The
files of this folder do not depend on the framework: `basics` and `process_sets` hold the state of a process,
`requests`, `negotiation`, `execution`, `adasum` and `engine` are the queue of named requests, `monitoring` is the
timeline and the stall check, and `elastic` (experimental) continues a job after the death of a rank.
"""
