"""Implement the Horovod 0.28 API with farandole, so that Horovod scripts run unchanged.

    import farandole.horovod.torch as hvd         # instead of: import horovod.torch as hvd

`python -m farandole.horovod.shim script.py` runs a script that imports `horovod`.

`torch` implements the API for PyTorch.  `tensorflow` and `keras` implement the APIs for TensorFlow 2 and Keras 3.
"""
