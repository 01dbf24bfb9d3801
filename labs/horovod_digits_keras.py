"""Train a network on handwritten digits with Horovod and Keras; farandole runs this Horovod script unchanged.

    farandole launch -n 2 -m farandole.horovod.shim labs/horovod_digits_keras.py
    mpirun -n 2 python -m farandole.horovod.shim labs/horovod_digits_keras.py --fp16-allreduce

The data set is included in scikit-learn (pip install scikit-learn) and contains 1797 images of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def digits():
    """Return the training and test sets: images (N, 8, 8, 1) with values from 0 to 1, and labels."""
    found = load_digits()
    images = found.images[..., None].astype(np.float32) / 16
    test = np.arange(len(images)) % 5 == 0
    return (images[~test], found.target[~test]), (images[test], found.target[test])


def network():
    """Return a network with two convolutions, batch normalization over all ranks, and two dense layers."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same"),
            hvd.SyncBatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main():
    """Train the network, and print the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="batch size per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate per rank")
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(42 + hvd.rank())
    (images, labels), test = digits()
    # each rank trains on a different part of the images; all ranks have the same number of batches
    steps = len(images) // hvd.size() // args.batch_size
    part = slice(hvd.rank(), steps * args.batch_size * hvd.size(), hvd.size())

    model = network()
    model.compile(
        optimizer=hvd.DistributedOptimizer(
            keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9),
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA cannot compile Horovod's operations
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(args.lr * hvd.size(), warmup_epochs=args.warmup_epochs),
    ]
    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(images[part], labels[part], args.batch_size, args.epochs, verbose, callbacks=callbacks)

    mine = [part[hvd.rank() :: hvd.size()] for part in test]
    predicted = model.predict(mine[0], verbose=0).argmax(1)
    correct = hvd.allreduce(
        tf.constant([np.sum(predicted == mine[1]), len(predicted)]), name="correct", op=hvd.Sum
    )
    if hvd.rank() == 0:
        print(f"test accuracy {int(correct[0]) / int(correct[1]):.4f}", flush=True)


if __name__ == "__main__":
    main()
