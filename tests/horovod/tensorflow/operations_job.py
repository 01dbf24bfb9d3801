"""Compare every operation with numpy, in eager mode and within `tf.function`; `test_operations` runs this program."""

from __future__ import annotations

import threading
import time

import numpy as np
import tensorflow as tf

import farandole.horovod.tensorflow as hvd
from farandole.horovod.tensorflow.bridge import SUPPORTED
from tests.horovod.tensorflow.jobs import close, given, in_both, must_fail, run_checks

tf.get_logger().setLevel("ERROR")  # these programs retrace functions intentionally
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
# nodes run on one thread on rank 0, and on four threads on other ranks
tf.config.threading.set_inter_op_parallelism_threads(4 if RANK else 1)


def everyone(shape, dtype=tf.float32, seed=0):
    return np.stack([given(rank, shape, dtype, seed) for rank in range(SIZE)])


def test_allreduce_of_every_type():
    for dtype in SUPPORTED:
        mine = tf.constant(given(RANK, (5, 3), dtype), dtype)
        wide = everyone((5, 3), dtype).astype(np.float64)
        for op, expected in ((hvd.Sum, wide.sum(0)), (hvd.Min, wide.min(0)), (hvd.Max, wide.max(0))):
            if dtype == tf.bool and op == hvd.Sum:
                expected = expected > 0
            for result in in_both(lambda x, op=op: hvd.allreduce(x, op=op), mine):
                assert result.dtype == dtype and result.shape == (5, 3)
                close(result, expected)
    for shape in ((), (0,), (0, 4), (1,), (2, 1, 3)):
        for result in in_both(hvd.allreduce, tf.constant(given(RANK, shape), tf.float32)):
            close(result, everyone(shape).mean(0))


def test_allreduce_options():
    mine, whole = tf.constant(given(RANK, (4, 2), tf.float64)), everyone((4, 2), tf.float64)
    for result in in_both(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), mine
    ):
        close(result, whole.sum(0) * 1.5)
    for result in in_both(lambda x: hvd.allreduce(x, average=False), mine):
        close(result, whole.sum(0))
    for result in in_both(lambda x: hvd.allreduce(x, op=hvd.Product), mine):
        close(result, whole.prod(0))
    for compression, tolerance in ((hvd.Compression.fp16, 1e-2), (hvd.Compression.bf16, 1e-1)):
        for result in in_both(lambda x, c=compression: hvd.allreduce(x, compression=c), mine):
            assert result.dtype == tf.float64
            np.testing.assert_allclose(result, whole.mean(0), atol=tolerance)
    for result in in_both(lambda x: hvd.allreduce(x, op=hvd.Adasum), mine):
        if SIZE == 2:
            (a, b), dot = whole, (whole[0] * whole[1]).sum()
            close(result, (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b)
    close(hvd.allreduce(tf.Variable(mine)), whole.mean(0))
    close(hvd.allreduce(given(RANK, (3,))), everyone((3,)).mean(0))  # a numpy array as input
    close(hvd.allreduce(tf.transpose(mine)), whole.mean(0).T)
    not_a_number = hvd.allreduce(tf.constant([np.nan if RANK == 0 else 1.0, np.inf]))
    assert np.isnan(not_a_number[0]) and np.isinf(not_a_number[1])
    mixed = [tf.constant(given(RANK, (3,), tf.int32, 1)), mine, tf.constant(given(RANK, (), tf.float32, 2))]
    for results in in_both(lambda *xs: hvd.grouped_allreduce(xs, op=hvd.Sum), *mixed):
        close(results[0], everyone((3,), tf.int32, 1).sum(0))
        close(results[1], whole.sum(0))
        close(results[2], everyone((), tf.float32, 2).sum(0))


def test_the_input_is_not_changed():
    mine = tf.constant(given(RANK, (1000,)))
    copy = mine.numpy().copy()
    for op in (hvd.Sum, hvd.Average, hvd.Max):
        hvd.allreduce(mine, op=op, prescale_factor=2.0)
        hvd.reducescatter(mine, op=op, prescale_factor=2.0)
    hvd.broadcast(mine, 0)
    assert (mine.numpy() == copy).all()


def test_slices():
    values, indices = given(RANK, (RANK + 1, 2)), np.arange(RANK + 1) + RANK
    all_values = np.concatenate([given(rank, (rank + 1, 2)) for rank in range(SIZE)])
    all_indices = np.concatenate([np.arange(rank + 1) + rank for rank in range(SIZE)])
    dense = np.zeros((2 * SIZE, 2))
    np.add.at(dense, all_indices, all_values)
    for op, expected in ((hvd.Sum, dense), (hvd.Average, dense / SIZE)):

        def gathered(values, indices, op=op):
            slices = tf.IndexedSlices(values, indices, tf.constant([2 * SIZE, 2], tf.int64))
            result = hvd.allreduce(slices, op=op)
            assert isinstance(result, tf.IndexedSlices)
            return tf.convert_to_tensor(result)

        for result in in_both(gathered, tf.constant(values), tf.constant(indices)):
            close(result, expected)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([2 * SIZE, 2]))
    must_fail("op=Average or op=Sum", lambda: hvd.allreduce(slices, op=hvd.Adasum))
    must_fail("prescale_factor and postscale_factor", lambda: hvd.allreduce(slices, prescale_factor=2.0))


def test_allgather_and_broadcast():
    for rows in ([rank + 1 for rank in range(SIZE)], [0, *[2] * (SIZE - 1)], [0] * SIZE, [3] * SIZE):
        whole = np.concatenate([given(rank, (rows[rank], 2)) for rank in range(SIZE)])
        for result in in_both(hvd.allgather, tf.constant(given(RANK, (rows[RANK], 2)))):
            close(result, whole)
    for dtype in SUPPORTED:
        for result in in_both(hvd.allgather, tf.constant(given(RANK, (2,), dtype), dtype)):
            close(result, everyone((2,), dtype).reshape(-1).astype(np.float64))
        for root in range(SIZE):
            for result in in_both(
                lambda x, root=root: hvd.broadcast(x, root), tf.constant(given(RANK, (3,), dtype), dtype)
            ):
                close(result, given(root, (3,), dtype).astype(np.float64))
    first, second = tf.constant(given(RANK, (RANK, 2))), tf.constant([RANK], tf.int64)
    for results in in_both(lambda *xs: hvd.grouped_allgather(xs), first, second):
        close(results[0], np.concatenate([given(rank, (rank, 2)) for rank in range(SIZE)]))
        close(results[1], np.arange(SIZE))


def test_alltoall_and_reducescatter():
    counts = [[(i + j) % 3 for j in range(SIZE)] for i in range(SIZE)]
    sent = [given(rank, (sum(counts[rank]), 2)) for rank in range(SIZE)]
    expected = np.concatenate(
        [np.split(sent[rank], np.cumsum(counts[rank])[:-1])[RANK] for rank in range(SIZE)]
    )
    for splits in (counts[RANK], tf.constant(counts[RANK]), tf.constant(counts[RANK], tf.int64)):
        for output, received in in_both(
            lambda x, s=splits: hvd.alltoall(x, splits=s), tf.constant(sent[RANK])
        ):
            close(output, expected)
            assert received.dtype == tf.int32 and received.numpy().tolist() == [c[RANK] for c in counts]
    for result in in_both(hvd.alltoall, tf.constant(given(RANK, (SIZE, 3)))):
        close(result, np.stack([given(rank, (SIZE, 3))[RANK] for rank in range(SIZE)]))

    rows = 2 * SIZE + 1
    whole = everyone((rows, 2))
    share = whole[:, :3] if RANK == 0 else whole[:, 2 * RANK + 1 : 2 * RANK + 3]
    for op, expected in ((hvd.Sum, share.sum(0)), (hvd.Average, share.mean(0)), (hvd.Max, share.max(0))):
        for result in in_both(lambda x, op=op: hvd.reducescatter(x, op=op), tf.constant(whole[RANK])):
            close(result, expected)
    for results in in_both(lambda *xs: hvd.grouped_reducescatter(xs, op=hvd.Sum), tf.constant(whole[RANK])):
        close(results[0], share.sum(0))


def test_gradients():
    """Compare gradients with one process that uses all ranks' inputs and averages their losses."""
    weights, mine = everyone((6, 2), seed=9), tf.constant(given(RANK, (6, 2)))

    def gradient(function, weight):
        def computed(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x) * weight)
            return tape.gradient(loss, x)

        return computed

    for op, factor in ((hvd.Sum, SIZE), (hvd.Average, 1)):
        for result in in_both(gradient(lambda x, op=op: hvd.allreduce(x, op=op), weights[RANK]), mine):
            close(result, weights.mean(0) * factor)
    for result in in_both(gradient(lambda x: hvd.broadcast(x, SIZE - 1), weights[RANK]), mine):
        close(result, weights.mean(0) * (RANK == SIZE - 1))

    rows = [rank + 1 for rank in range(SIZE)]
    weights = everyone((sum(rows), 2), seed=5)
    for result in in_both(gradient(hvd.allgather, weights[RANK]), tf.constant(given(RANK, (rows[RANK], 2)))):
        close(result, np.split(weights.mean(0), np.cumsum(rows)[:-1])[RANK])

    # the rows of rank 1 follow 20 bytes of rank 0, so their alignment does not meet TensorFlow's requirement
    weights = everyone((5 * SIZE,), seed=4)
    for result in in_both(gradient(hvd.allgather, weights[RANK]), tf.constant(given(RANK, (5,)))):
        close(result, np.split(weights.mean(0), SIZE)[RANK])

    counts = [[(i + j) % 3 for j in range(SIZE)] for i in range(SIZE)]
    into = [[counts[i][rank] for i in range(SIZE)] for rank in range(SIZE)]
    weights = [given(rank, (sum(into[rank]), 2), seed=6) for rank in range(SIZE)]
    parts = [np.split(weights[rank], np.cumsum(into[rank])[:-1])[RANK] for rank in range(SIZE)]
    sent = tf.constant(given(RANK, (sum(counts[RANK]) + 2, 2)))  # the last two rows are not sent
    for result in in_both(gradient(lambda x: hvd.alltoall(x, counts[RANK])[0], weights[RANK]), sent):
        close(result, np.concatenate([*parts, np.zeros((2, 2))]))

    weights = [given(rank, (2 + (rank < 1),), seed=7) for rank in range(SIZE)]
    for op, factor in ((hvd.Sum, SIZE), (hvd.Average, 1)):
        scattered = gradient(lambda x, op=op: hvd.reducescatter(x, op=op), weights[RANK])
        for result in in_both(scattered, tf.constant(given(RANK, (2 * SIZE + 1,)))):
            close(result, np.concatenate(weights) * factor)

    must_fail(
        "allreduce is not differentiable with op=Min",
        lambda: gradient(lambda x: hvd.allreduce(x, op=hvd.Max), 1.0)(mine),
    )


def test_functions_loops_and_branches():
    """Run nested nodes, which all ranks must run in the same order, and trace more often on some ranks."""
    state = tf.Variable(1.0)

    @tf.function
    def inner(x):
        state.assign_add(hvd.allreduce(x, op=hvd.Sum))
        return hvd.allreduce(state)

    @tf.function
    def program(x):
        total = tf.zeros(())
        for i in tf.range(3):
            total += hvd.allreduce(x * tf.cast(i, tf.float32), op=hvd.Sum)
        if x > 0:  # the same on all ranks
            state.assign_add(hvd.allreduce(x, op=hvd.Sum))
        independent = hvd.allreduce(x + 1, op=hvd.Sum)
        return total, independent, inner(x), inner(x), hvd.allgather(x[None])

    ranks = sum(rank + 1.0 for rank in range(SIZE))
    for _ in range(3):
        state.assign(1.0)
        total, independent, first, second, everything = program(tf.constant(RANK + 1.0))
        close(total, 3 * ranks)
        close(independent, ranks + SIZE)
        close(first, 1 + 2 * ranks)
        close(second, 1 + 3 * ranks)
        close(everything, np.arange(SIZE) + 1.0)

    traces = []

    @tf.function
    def retraced(x):
        traces.append(x.shape)
        return hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum) + hvd.allreduce(tf.reduce_max(x), op=hvd.Max)

    for step in range(3):
        close(retraced(tf.ones(4 + RANK * step)), sum(4 + rank * step for rank in range(SIZE)) + 1)
    assert len(traces) == (1 if RANK == 0 else 3)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32)])
    def of_any_shape(x):
        gathered = hvd.allgather(x)
        return gathered, hvd.allreduce(gathered), hvd.broadcast(gathered, 0)

    for result in of_any_shape(tf.fill((RANK + 1, 2), float(RANK))):
        close(result, np.concatenate([np.full((rank + 1, 2), rank) for rank in range(SIZE)]))


def test_named_operations_in_any_order():
    """Issue two named operations from two threads, in different orders on different ranks."""
    results = {}

    def issue(name):
        results[name] = hvd.allreduce(tf.constant(float(len(name))), name=name, op=hvd.Sum)

    names = ["a", "bb", "ccc"]
    threads = [threading.Thread(target=issue, args=[name]) for name in names]
    for thread in threads if RANK % 2 else reversed(threads):
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert {name: float(result) for name, result in results.items()} == {n: SIZE * len(n) for n in names}


def test_objects_and_variables():
    variables = [tf.Variable(given(RANK, (3, 2))), tf.Variable(RANK), tf.Variable([RANK, 7], dtype=tf.uint32)]
    hvd.broadcast_variables(variables, root_rank=SIZE - 1)
    close(variables[0], given(SIZE - 1, (3, 2)))
    assert int(variables[1]) == SIZE - 1 and variables[2].numpy().tolist() == [SIZE - 1, 7]
    traced = tf.Variable(float(RANK))
    tf.function(lambda: hvd.broadcast_variables([traced], 0))()
    assert float(traced) == 0
    hvd.broadcast_variables([], 0)
    must_fail("a tf.Variable or a keras.Variable", lambda: hvd.broadcast_variables([tf.ones(2)], 0))
    assert hvd.broadcast_object({"rank": RANK}, 1 % SIZE) == {"rank": 1 % SIZE}
    assert hvd.broadcast_object_fn(0)([RANK]) == [0]
    assert hvd.allgather_object("x" * RANK) == ["x" * rank for rank in range(SIZE)]
    must_fail("use `hvd.broadcast_variables", lambda: hvd.broadcast_global_variables(0))


def test_process_sets_barrier_and_join():
    alone = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    mine = tf.constant([float(RANK)])
    for result in in_both(lambda x: hvd.allreduce(x, process_set=alone[RANK]), mine):
        close(result, [RANK])
    must_fail("already", lambda: hvd.add_process_set(range(SIZE)), ValueError)
    if SIZE > 1:
        other = alone[(RANK + 1) % SIZE]
        must_fail("cannot run its operations", lambda: hvd.allreduce(mine, process_set=other))
    hvd.barrier()
    tf.function(hvd.barrier)()
    for _ in range(RANK):  # ranks run out of data one by one
        hvd.allreduce(mine, op=hvd.Sum)
    assert hvd.join() == SIZE - 1
    assert int(tf.function(hvd.join)()) in range(SIZE)


def test_invalid_arguments_and_mismatches():
    must_fail("Tensor .*string is not supported", lambda: hvd.allreduce(tf.constant("a")))
    must_fail("at least one tensor", lambda: hvd.grouped_allreduce([]))
    must_fail("invalid root rank 99", lambda: hvd.broadcast(tf.ones(1), 99))
    must_fail("got a scalar", lambda: hvd.allgather(tf.constant(1.0)))
    must_fail("supersedes average", lambda: hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum))
    must_fail("op=17 is not supported", lambda: hvd.allreduce(tf.ones(1), op=17))
    must_fail("run on the host", lambda: hvd.allreduce(tf.ones(1), device_dense="/gpu:0"))
    must_fail("jit_compile=False", lambda: tf.function(hvd.allreduce, jit_compile=True)(tf.ones(1)))
    with tf.Graph().as_default():
        must_fail("sessions are not", lambda: hvd.allreduce(tf.ones(1)))
    must_fail("Adasum", lambda: hvd.reducescatter(tf.ones(4), op=hvd.Adasum))
    if SIZE > 1:
        shapes = tf.ones(2 + RANK)
        must_fail(
            "Mismatched allreduce tensor shapes for tensor wrong: rank 0 sent",
            lambda: hvd.allreduce(shapes, name="wrong"),
        )
        must_fail(
            "Mismatched allreduce tensor shapes",
            lambda: tf.function(hvd.allreduce)(shapes),
            tf.errors.OpError,
        )
        types = tf.ones(2, tf.float32 if RANK else tf.float64)
        must_fail("Mismatched allreduce data types", lambda: hvd.allreduce(types, name="types"))
        refused = {
            "Mismatched": (lambda: hvd.allgather(types, name="x"), tf.errors.FailedPreconditionError),
            "Mismatched allgather": (lambda: hvd.allgather(types, name="x"), hvd.HorovodInternalError),
            "does not equal number": (lambda: hvd.alltoall(types, [1]), tf.errors.InvalidArgumentError),
            "does not equal": (lambda: tf.function(hvd.alltoall)(types, [1]), tf.errors.InvalidArgumentError),
            "does not": (lambda: hvd.alltoall(types, [1]), ValueError),
        }
        for pattern, (call, kind) in refused.items():
            must_fail(pattern, call, kind)
    close(hvd.allreduce(tf.ones(2)), np.ones(2))  # valid operations work after errors


def test_uint16():
    mine = tf.constant([65535 - RANK, RANK, 7], tf.uint16)
    whole = np.array([[65535 - rank, rank, 7] for rank in range(SIZE)])
    for op, expected in (
        (hvd.Sum, whole.sum(0) % 2**16),
        (hvd.Average, whole.sum(0) // SIZE),
        (hvd.Max, whole.max(0)),
    ):
        for result in in_both(lambda x, op=op: hvd.allreduce(x, op=op), mine):
            assert result.dtype == tf.uint16
            close(result, expected)
    for result in in_both(
        lambda x: hvd.reducescatter(x, op=hvd.Min), tf.constant([65535 - RANK] * SIZE, tf.uint16)
    ):
        assert result.dtype == tf.uint16 and result.numpy().tolist() == [65536 - SIZE]
    for result in in_both(hvd.alltoall, tf.constant([65535 - RANK] * SIZE, tf.uint16)):
        assert result.dtype == tf.uint16
        close(result, whole[:, 0])


if __name__ == "__main__":
    run_checks(globals())
