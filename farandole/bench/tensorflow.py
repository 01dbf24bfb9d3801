"""Train a ResNet on one synthetic batch with TensorFlow.

The networks are the same as in `farandole.models.resnet`, built from Keras layers.

In every implementation, including "alone", a step is a `tf.function` without XLA.  XLA cannot compile the reduction,
and the implementations must differ only in their communication.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from farandole.bench.options import BenchError, check_choice
from farandole.bench.setup import TrainingSetup
from farandole.launch.runtime import Runtime
from farandole.models.resnet import EXPANSION, ResNetConfig, resnet_config

if TYPE_CHECKING:
    import keras

IMPLEMENTATIONS = {
    "farandole": "DistributedGradientTape of farandole.horovod.tensorflow",
    "horovod": "DistributedOptimizer of farandole.horovod.tensorflow",
}


def build_resnet(config: ResNetConfig, image_size: int) -> keras.Model:
    """Return a ResNet with the architecture in `config`.

    The network maps images (batch, image_size, image_size, 3) to logits (batch, classes).
    """
    import keras

    layers = keras.layers

    def convolution(x: Any, channels: int, size: int, stride: int = 1, last: bool = False) -> Any:
        # pad as PyTorch does; "same" pads differently if there is a stride
        x = layers.ZeroPadding2D(size // 2)(x) if size > 1 else x
        x = layers.Conv2D(channels, size, stride, use_bias=False, kernel_initializer="he_normal")(x)
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
        return x if last else layers.ReLU()(x)

    images = keras.Input((image_size, image_size, 3))
    x = convolution(images, config.width, 7, 2)
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for inputs, inside, stride in (block for stage in config.stages for block in stage):
        outputs = inside * EXPANSION[config.block]
        if config.block == "basic":
            y = convolution(convolution(x, inside, 3, stride), inside, 3, last=True)
        else:
            y = convolution(convolution(x, inside, 1), inside, 3, stride)
            y = convolution(y, outputs, 1, last=True)
        if stride != 1 or inputs != outputs:
            x = convolution(x, outputs, 1, stride, last=True)
        x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(config.classes, dtype="float32")(x))


class TensorFlowTraining:
    """A training run on one rank with one implementation.

    Each rank has its own synthetic batch, and all ranks have the same initial weights.
    """

    def __init__(self, setup: TrainingSetup, runtime: Runtime, implementation: str) -> None:
        import keras
        import tensorflow as tf

        import farandole.horovod.tensorflow as hvd

        hvd.init()
        self.close: Callable[[], None] = hvd.shutdown
        config, before = resnet_config(setup.model), keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16" if setup.autocast else "float32")
        model = build_resnet(config, setup.image_size)
        keras.config.set_dtype_policy(before)
        hvd.broadcast_variables(model.variables, root_rank=0)
        generator = np.random.default_rng(1 + runtime.rank)
        shape = setup.micro_batch, setup.image_size, setup.image_size, 3
        images = tf.constant(generator.standard_normal(shape, np.float32))
        targets = tf.constant(generator.integers(0, config.classes, setup.micro_batch))
        compression = hvd.Compression.fp16 if setup.fp16_allreduce else hvd.Compression.none
        optimizer = keras.optimizers.SGD(0.01)
        if implementation == "horovod":
            optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
                loss = tf.reduce_mean(losses)
            if implementation == "farandole":
                tape = hvd.DistributedGradientTape(tape, compression=compression)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        self.model = model
        self._step = step
        self._loss: Any = None

    def step(self) -> None:
        """Run one training step on the batch."""
        self._loss = self._step()

    def finish(self) -> None:
        """Wait for the loss of the last step."""
        if self._loss is not None:
            self._loss.numpy()


class TensorFlow:
    """The framework "tensorflow"."""

    def check(self, setup: TrainingSetup) -> None:
        """Raise BenchError for an unknown implementation, or if TensorFlow is not installed."""
        check_choice("--implementation", setup.implementation, IMPLEMENTATIONS)
        if importlib.util.find_spec("tensorflow") is None:
            raise BenchError(
                "--framework tensorflow requires TensorFlow 2: pip install 'farandole[tensorflow]'"
            )

    def build(self, setup: TrainingSetup, runtime: Runtime, implementation: str) -> TensorFlowTraining:
        """Return this rank's training run."""
        return TensorFlowTraining(setup, runtime, implementation)
