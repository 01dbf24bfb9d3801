"""`hvd.elastic` for TensorFlow is not there; importing it says what is."""

raise ImportError(
    "horovod.tensorflow.elastic is not there: elastic training is implemented for PyTorch (horovod.torch.elastic); "
    "with TensorFlow save checkpoints on rank 0, and have the launcher restart the job (torchrun --max-restarts)"
)
