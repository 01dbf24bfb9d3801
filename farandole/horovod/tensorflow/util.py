"""Provide the functions in `horovod.tensorflow.util`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Return whether TensorFlow executes operations eagerly."""
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert the function to a `tf.function`."""
    made: Callable[..., Any] = tf.function(function)
    return made


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function's results by argument, separately for eager mode and graphs."""
    results: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def cached(*arguments: Any) -> Any:
        key = (*arguments, _executing_eagerly())
        if key not in results:
            results[key] = function(*arguments)
        return results[key]

    return cached
