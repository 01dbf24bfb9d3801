"""Implement the Horovod 0.28 API with farandole, so that Horovod scripts run unchanged.

    import farandole.horovod.torch as hvd         # instead of: import horovod.torch as hvd

`python -m farandole.horovod.shim script.py` runs a script that imports `horovod`.

`torch` implements the API for PyTorch.  `tensorflow` and `keras` implement the APIs for TensorFlow 2 and Keras 3.  All
frameworks share the other modules:

- `basics` provides the functions that all frameworks have in common.
- `compression` provides the gradient compressors.
- `state` stores this process's ranks, requests and process sets (`process_sets`).
- `engine` queues named requests (`requests`), finds the requests that all ranks have submitted (`negotiation`), and
  runs their collectives (`execution`).
- `monitoring` writes the timeline and detects stalled tensors.
- `elastic` (experimental) continues a job after a rank dies.
- `shim` installs this package under Horovod's module names.
"""
