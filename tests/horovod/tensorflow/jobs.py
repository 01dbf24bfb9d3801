"""Helpers for the TensorFlow test programs, including the function that runs a program."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.launch.jobs import ROOT, finish, ours, start

LIMIT_S = 300
"""The time limit for a job; on two busy cores, each rank needs ten seconds to import TensorFlow."""

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'farandole[tensorflow]'",
)


def job(module: str, size: int, *arguments: str, **more: str) -> str:
    """Run a test program on `size` ranks, and return its output."""
    program = str(ROOT / "tests" / "horovod" / "tensorflow" / f"{module}.py")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ours("-n", str(size), program, *arguments)
    status, out, err = finish(start(command, fork_ranks=True, **quiet, **more), LIMIT_S)
    assert status == 0, f"{out}\n{err}"
    return out


def given(rank: int, shape: tuple[int, ...], dtype: Any = None, seed: int = 0) -> Any:
    """Return one rank's input as a numpy array."""
    generator = np.random.default_rng(1000 * seed + rank)
    kind = np.dtype(np.float32 if dtype is None else dtype.as_numpy_dtype)
    if kind == np.bool_:
        return generator.integers(0, 2, shape).astype(kind)
    if np.issubdtype(kind, np.integer):
        return generator.integers(0, 9, shape).astype(kind)
    return np.asarray(generator.standard_normal(shape)).astype(kind)


def close(result: Any, expected: Any) -> None:
    """Assert that two arrays have the same shape, and are equal up to rounding in the result's data type."""
    found, expected = np.asarray(result), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    loose = {"float16": 1e-2, "bfloat16": 1e-1, "float64": 1e-12}.get(found.dtype.name, 1e-5)
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=loose, atol=loose)


def in_both(function: Callable[..., Any], *inputs: Any) -> list[Any]:
    """Return the results of a function in eager mode and within `tf.function`."""
    import tensorflow as tf

    return [function(*inputs), tf.function(function)(*inputs)]


def must_fail(pattern: str, call: Callable[[], Any], kind: Any = Exception) -> None:
    """Assert that a call raises an exception whose message matches a pattern."""
    with pytest.raises(kind, match=re.compile(pattern, re.DOTALL)):
        call()


def run_checks(program: dict[str, Any]) -> None:
    """Call all functions in a program whose names begin with `test_`, in definition order."""
    rank = program["RANK"]
    for name, check in list(program.items()):
        if name.startswith("test_"):
            try:
                check()
            except BaseException:
                print(f"rank {rank} failed in {name}", flush=True)
                raise
    print(f"all good on rank {rank}", flush=True)
