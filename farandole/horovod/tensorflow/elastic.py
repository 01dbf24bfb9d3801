"""Raise ImportError, because `hvd.elastic` is not implemented for TensorFlow."""

raise ImportError(
    "horovod.tensorflow.elastic is not implemented; elastic training requires PyTorch (horovod.torch.elastic). "
    "With TensorFlow, save checkpoints on rank 0 and let the launcher restart the job (torchrun --max-restarts)"
)
