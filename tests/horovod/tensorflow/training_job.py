"""Compare training on several ranks with one process; `test_training` runs this program."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import farandole.horovod.tensorflow.keras as hvd
from tests.horovod.tensorflow.jobs import close, given, must_fail, run_checks

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.get_logger().setLevel("ERROR")
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
FOLDER = sys.argv[1]
keras.config.set_dtype_policy("float64")


def share(rows):
    """Return this rank's part of a batch."""
    return rows[RANK * len(rows) // SIZE : (RANK + 1) * len(rows) // SIZE]


BATCH = 8 * SIZE
DATA = [(given(0, (BATCH, 5), tf.float64, s), given(1, (BATCH, 1), tf.float64, s)) for s in range(4)]


class Deep:
    """A network with 2 * `layers` variables, which have the same values on all ranks."""

    def __init__(self, layers=30):
        shapes = [(5, 5), (5,)] * (layers - 1) + [(5, 1), (1,)]
        self.variables = [
            tf.Variable(0.5 * given(7, shape, tf.float64, seed)) for seed, shape in enumerate(shapes)
        ]

    def loss(self, inputs, targets):
        values = inputs
        for weights, offset in zip(self.variables[::2], self.variables[1::2], strict=True):
            values = tf.tanh(values @ weights + offset)
        return tf.reduce_mean(tf.square(values - targets))

    def step(self, inputs, targets, wrap):
        with tf.GradientTape() as tape:
            loss = self.loss(inputs, targets)
        gradients = wrap(tape, self).gradient(loss, self.variables)
        for variable, gradient in zip(self.variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss


def test_the_tape_of_a_deep_network():
    """Train a network with 60 variables, and compare it with one process that trains on all batches."""
    alone = Deep()
    step = tf.function(alone.step)
    for inputs, targets in DATA:
        step(inputs, targets, lambda tape, _: tape)
    ways = {
        "as it is": {},
        "in groups": {"groups": 7},
        "in chosen groups": {"groups": "chosen"},
        "in more groups than there are variables": {"groups": 100},
        "predivided": {"gradient_predivide_factor": 2.0},
    }
    for way, options in ways.items():
        for graph in (True, False):
            mine = Deep()

            def wrap(tape, model, options=options):
                chosen = {"groups": [model.variables[:3], model.variables[10:20]]}
                return hvd.DistributedGradientTape(
                    tape, **(chosen if "chosen" in options.values() else options)
                )

            step = tf.function(mine.step) if graph else mine.step
            for inputs, targets in DATA:
                # like user scripts, reduce the loss with a separate operation
                hvd.allreduce(step(share(inputs), share(targets), wrap))
            for found, expected in zip(mine.variables, alone.variables, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=f"{way}, {graph}")
    rounded = Deep()
    step = tf.function(rounded.step)
    for inputs, targets in DATA:
        step(
            share(inputs),
            share(targets),
            lambda tape, _: hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16),
        )
    for found, expected in zip(rounded.variables, alone.variables, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-2)


def test_arguments_and_results_of_the_tape():
    weights, unused, whole = tf.Variable([2.0, 3.0]), tf.Variable(1.0), tf.constant(np.arange(SIZE) + 1.0)
    mine = tf.cast(whole[RANK], tf.float32)
    mean = float(np.mean(whole))
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_sum(weights * mine)
    assert isinstance(tape, tf.GradientTape)
    close(tape.gradient(loss, weights), [mean, mean])
    nested = tape.gradient(loss, {"a": [weights], "b": unused})
    close(nested["a"][0], [mean, mean])
    assert nested["b"] is None
    assert tape.gradient(loss, [unused]) == [None]
    for op, expected in ((hvd.Sum, mean * SIZE), (hvd.Max, SIZE), (hvd.Adasum, mean if SIZE == 1 else None)):
        if SIZE == 2 and op == hvd.Adasum:
            expected = (1 - 2 / 2) * 1 + (
                1 - 2 / 8
            ) * 2  # the Adasum of the parallel gradients 1 and 2, for each component
        if SIZE <= 2:
            other = hvd.DistributedGradientTape(_recorded(weights, mine), op=op)
            close(other.gradient(other.loss, weights), [expected] * 2)
    must_fail("already distributed", lambda: hvd.DistributedGradientTape(tape))
    must_fail(
        "op != Average",
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0),
    )
    must_fail(
        "only appear once",
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=[[weights], [weights]]),
    )
    must_fail("positive integer", lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=-1))
    must_fail("expected a tf.GradientTape", lambda: hvd.DistributedGradientTape(None))

    layer, shared = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    inputs = tf.constant([[float(RANK + 1)]], tf.float64)
    layer(inputs), shared(inputs)
    for scales in (True, False):
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(layer(inputs) + shared(inputs))
        partial = hvd.PartialDistributedGradientTape(plain, local_layers=layer, scale_local_gradients=scales)
        own, common = partial.gradient(loss, [layer.kernel, shared.kernel])
        close(own, [[(RANK + 1.0) / (SIZE if scales else 1)]])
        close(common, [[mean]])


def _recorded(weights, factor):
    tape = tf.GradientTape()
    with tape:
        tape.loss = tf.reduce_sum(weights * factor)
    return tape


def test_embeddings():
    tables = {}
    for way in ("alone", "sparse", "dense"):
        table = tables[way] = tf.Variable(given(3, (10, 4), tf.float64))

        @tf.function
        def step(rows, table=table, way=way):
            with tf.GradientTape() as tape:
                looked_up = tf.gather(table, rows)
                loss = tf.reduce_mean(tf.reduce_sum(tf.square(looked_up), 1))
            if way != "alone":
                tape = hvd.DistributedGradientTape(tape, sparse_as_dense=way == "dense")
            gradient = tape.gradient(loss, table)
            assert isinstance(gradient, tf.IndexedSlices) == (way != "dense")
            table.assign_sub(0.1 * tf.convert_to_tensor(gradient))

        for seed in range(3):
            rows = np.random.default_rng(seed).integers(0, 10, BATCH)
            step(tf.constant(rows if way == "alone" else share(rows)))
        np.testing.assert_allclose(table, tables["alone"], rtol=1e-12)


def model_of(seed, *layers):
    """Return a model whose weights depend only on the seed."""
    model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1)])
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(given(seed, variable.shape, tf.float64, 50 + number))
    return model


def fitted(optimizer, epochs=2, seed=0, whole=False, layers=(), callbacks=(), **compiled):
    """Train a model with Keras on this rank's part of each batch; with `whole`, train on full batches."""
    model = model_of(seed, keras.layers.Dense(6, activation="tanh"), *layers)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **compiled)
    part = (lambda rows: rows) if whole else share
    inputs, targets = (np.concatenate([part(batch[i]) for batch in DATA]) for i in range(2))
    size = len(part(DATA[0][0]))
    history = model.fit(inputs, targets, size, epochs, 0, shuffle=False, callbacks=list(callbacks))
    return model, history.history


def same_weights(one, other, tolerance=1e-9):
    for found, expected in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_fit():
    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5),
        "adam": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)),
    }
    for make in optimizers.values():
        expected, history = fitted(make(), whole=True)
        for eagerly in (False, True):
            distributed = hvd.DistributedOptimizer(make())
            callbacks = [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
            ]
            model, mine = fitted(distributed, seed=RANK, callbacks=callbacks, run_eagerly=eagerly)
            same_weights(model, expected)
            for name, values in history.items():
                np.testing.assert_allclose(mine[name], values, rtol=1e-6)
        assert isinstance(distributed, type(make()))
        assert int(model.optimizer.iterations) == 2 * len(DATA)


def test_several_passes_per_step():
    for average in (True, False):
        model = model_of(1)
        plain = keras.optimizers.SGD(0.1, momentum=0.9)
        for first, second in (DATA[:2], DATA[2:]):
            with tf.GradientTape() as tape:
                losses = [tf.reduce_mean(tf.square(model(x) - y)) for x, y in (first, second)]
                loss = (losses[0] + losses[1]) / (2 if average else 1)
            plain.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
        for graph in (True, False):
            mine = model_of(1)
            distributed = hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.9),
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
            )

            def step(inputs, targets, mine=mine, distributed=distributed):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(mine(inputs) - targets))
                gradients = tape.gradient(loss, mine.trainable_variables)
                distributed.apply_gradients(zip(gradients, mine.trainable_variables, strict=True))

            step = tf.function(step) if graph else step
            for inputs, targets in DATA:
                step(share(inputs), share(targets))
            same_weights(mine, model)
            assert int(distributed.iterations) == len(DATA)
    _, history = fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2))
    assert len(history["loss"]) == 2


def test_sync_batch_normalization():
    expected, _ = fitted(keras.optimizers.SGD(0.1), whole=True, layers=[keras.layers.BatchNormalization()])
    model, _ = fitted(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), layers=[hvd.SyncBatchNormalization()]
    )
    same_weights(model, expected)
    everyone = [
        1e4 + given(rank, (3 + rank, 4, 2)) for rank in range(SIZE)
    ]  # batches of different sizes, far from zero
    whole = np.concatenate([each.reshape(-1, 2) for each in everyone]).astype(np.float64)
    layer = hvd.SyncBatchNormalization(dtype="float32", momentum=0.0)
    layer(everyone[RANK], training=True)
    np.testing.assert_allclose(layer.moving_variance, whole.var(0), rtol=1e-3)
    np.testing.assert_allclose(layer.moving_mean, whole.mean(0), rtol=1e-6)
    masks = [np.arange(4 * (3 + rank)).reshape(3 + rank, 4) % 3 > 0 for rank in range(SIZE)]
    layer(everyone[RANK], training=True, mask=masks[RANK])
    kept = np.concatenate([each[mask] for each, mask in zip(everyone, masks, strict=True)]).astype(np.float64)
    np.testing.assert_allclose(layer.moving_variance, kept.var(0), rtol=1e-3)
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert isinstance(again, hvd.SyncBatchNormalization) and again.momentum == 0.0
    must_fail(
        "synchronized=True applies to tf.distribute", lambda: hvd.SyncBatchNormalization(synchronized=True)
    )


def test_saving():
    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model, _ = fitted(distributed)
    path = f"{FOLDER}/{RANK}.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.SGD
    loaded = hvd.load_model(path)
    for optimizer in (plain.optimizer, loaded.optimizer):
        for mine, theirs in zip(optimizer.variables, distributed.variables, strict=True):
            close(mine, theirs)
    must_fail("already distributed", lambda: hvd.DistributedOptimizer(loaded.optimizer))
    expected, _ = fitted(keras.optimizers.SGD(0.1, momentum=0.9), whole=True)
    for inputs, targets in DATA:
        loaded.train_on_batch(share(inputs), share(targets))
        expected.train_on_batch(inputs, targets)
    same_weights(loaded, expected)
    clone = type(distributed).from_config(distributed.get_config())
    model, _ = fitted(clone)
    same_weights(model, fitted(keras.optimizers.SGD(0.1, momentum=0.9), whole=True)[0])


def test_local_variables_are_not_broadcast():
    for as_list in (True, False):
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1, use_bias=False)]
        )
        for weight in model.weights:
            weight.assign(tf.fill(weight.shape, tf.cast(RANK, weight.dtype)))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        kernel = model.layers[0].kernel
        local = [kernel, model.layers[0].bias] if as_list else kernel
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(SIZE - 1, local_variables=local)
        model.fit(np.zeros((1, 2)), np.zeros((1, 1)), verbose=0, callbacks=[broadcast])
        close(model.layers[0].kernel, np.full((2, 2), RANK))
        close(model.layers[0].bias, np.full(2, RANK if as_list else SIZE - 1))
        close(model.layers[1].kernel, np.full((2, 1), SIZE - 1))
    must_fail(
        "a tf.Variable or a keras.Variable",
        lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1.0]),
    )


def test_learning_rate_callbacks():
    class Rates(keras.callbacks.Callback):
        def __init__(self):
            self.rates = []

        def on_train_batch_begin(self, batch, logs=None):
            self.rates.append(float(self.model.optimizer.learning_rate))

    rates = Rates()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2, verbose=1)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.1 * SIZE, 0.5, start_epoch=2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    _, history = fitted(optimizer, epochs=4, callbacks=[warmup, decay, rates])
    steps = 2 * len(DATA)
    rising = [0.1 * (1 + (SIZE - 1) * (i + 1) / steps) for i in range(steps)]
    falling = [0.1 * SIZE * 0.5**epoch for epoch in (2, 3) for _ in DATA]
    np.testing.assert_allclose(rates.rates, rising + falling, rtol=1e-6)
    np.testing.assert_allclose(history["lr"][-1], 0.1 * SIZE / 8, rtol=1e-6)
    must_fail("initial_lr", lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0))

    # compare with explicit SGD: the velocity is scaled with the learning rate
    weight, velocity, rate = 1.0, 0.0, 0.1
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.ones((1, 1))])
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    model.fit(np.ones((1, 1)), np.zeros((1, 1)), epochs=3, verbose=0, callbacks=[schedule])
    for epoch in range(3):
        new = 0.1 * 0.5**epoch
        velocity = 0.9 * (new / rate) * velocity - new * 2 * weight
        weight, rate = weight + velocity, new
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-6)  # learning rates are float32


def test_loss_scaling_and_invalid_arguments():
    keras.config.set_dtype_policy("mixed_float16")
    must_fail("LossScaleOptimizer", lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    model, _ = fitted(scaled)
    assert model.optimizer is scaled
    for weights in model.get_weights():  # the weights are equal on all ranks
        close(hvd.broadcast(weights, 0), weights)
    # all ranks skip the step after an overflow on one rank
    before = model.get_weights()
    model.train_on_batch(share(DATA[0][0]) * (1e30 if RANK == 0 else 1), share(DATA[0][1]))
    same_weights(model, type("Before", (), {"get_weights": lambda self: before})())
    keras.config.set_dtype_policy("float64")

    must_fail(
        "op=Adasum is not supported",
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum),
    )
    must_fail(
        "expected a Keras 3 optimizer",
        lambda: hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1)),
    )
    must_fail(
        "must be 1 or more",
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=0),
    )
    must_fail(
        "jit_compile=False",
        lambda: fitted(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True),
    )


if __name__ == "__main__":
    run_checks(globals())
