"""The C core: shared-memory collectives within a host, and messages between all processes.

The library is built with the package if a C compiler is available.  This module opens the library with ctypes, which
releases the interpreter lock during every call.  If the library or a required system call is missing, `available`
returns False, and `why_unavailable` returns the reason.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import (
    POINTER,
    c_bool,
    c_char,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from pathlib import Path

ABI = 15
MAX_RANKS = 256
NOTE_BYTES = 160
KEY_BYTES = 32
SILENCE_S = 15.0
"""Seconds without a response after which another host is treated as unreachable."""
BACKGROUND, MAIN_THREAD, TRY = 1, 2, 4
"""Flags of a call.

BACKGROUND: Sleep sooner than usual while waiting.
MAIN_THREAD: Handle signals while waiting.
TRY: When the timeout of a message expires, return `Status.PENDING` instead of failing the group.
"""


class Status(IntEnum):
    """The result of a call into the C core."""

    OK = 0
    DIED = 1
    LEFT = 2
    LATE = 3
    MISMATCH = 4
    COUNT_MISMATCH = 5
    INTERRUPTED = 6
    UNSUPPORTED = 7
    PENDING = 8
    CLOSED = 9
    ELSEWHERE = 10
    PART_COUNT_MISMATCH = 11
    INVALID = 12
    NO_MEMORY = 13
    SILENT = 14


class Operation(IntEnum):
    """The operation codes of the C core."""

    NOTHING = 0
    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    BROADCAST = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10
    RECV = 11
    SCAN = 12
    EXSCAN = 13


LAST_STATUS = 64
"""The smallest number that can be the address of a message.

Functions that post a message return the address of the message or, on failure, a `Status`, which is smaller.
"""


class VectorLevel(IntEnum):
    """The instruction sets for which the reductions are compiled."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2


class WeightType(IntEnum):
    """The number formats of packed weights."""

    F32 = 0
    BF16 = 1
    INT8 = 2


class Call(ctypes.Structure):
    """`struct frd_call`: the operation and arguments of a rank's call, for comparison between ranks."""

    _fields_ = [
        ("index", c_uint64),
        ("operation", c_uint32),
        ("type", c_uint32),
        ("op", c_uint32),
        ("root", c_int32),
        ("count", c_uint64),
        ("layout", c_uint64),
        ("stage", c_uint64),
        ("source", c_uint64),
        ("target", c_uint64),
    ]


class Failure(ctypes.Structure):
    """`struct frd_failure`: the reason for a group's failure."""

    _fields_ = [
        ("status", c_uint32),
        ("culprit", c_int32),
        ("reporter", c_int32),
        ("missing", c_int32),
        ("timeout", c_double),
        ("culprit_call", Call),
        ("reporter_call", Call),
        ("note", c_char * NOTE_BYTES),
    ]


StallWarning = ctypes.CFUNCTYPE(None, c_double, c_double)
"""The type of the function that the core calls if this rank has waited for several seconds.

The arguments are the time that this rank has waited, and the time after which the wait fails, in seconds.
"""

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "frd_abi": (c_int, []),
    "frd_vector_level": (c_int, []),
    "frd_use_vector_level": (c_int, [c_int]),
    "frd_tickets_new": (c_void_p, []),
    "frd_tickets_free": (None, [c_void_p]),
    "frd_tickets_post": (None, [c_void_p]),
    "frd_tickets_take": (None, [c_void_p]),
    "frd_tickets_close": (None, [c_void_p]),
    "frd_tickets_wait": (c_int, [c_void_p]),
    "frd_combine": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int]),
    "frd_set_interrupts": (None, [c_void_p] * 4),
    "frd_pending_interrupt": (None, [POINTER(c_void_p)] * 3),
    "frd_arena_open": (c_int, [c_int, c_size_t]),
    "frd_arena_bytes": (c_size_t, []),
    "frd_arena_used": (c_size_t, []),
    "frd_alloc": (c_void_p, [c_size_t]),
    "frd_free": (None, [c_void_p]),
    "frd_endpoint_open": (c_void_p, [c_int, c_int]),
    "frd_endpoint_block": (c_uint64, [c_void_p]),
    "frd_endpoint_add": (c_int, [c_void_p, c_int, c_int, c_size_t, c_uint64, c_int64]),
    "frd_endpoint_close": (None, [c_void_p]),
    "frd_endpoint_forked": (None, [c_void_p]),
    "frd_tcp_open": (c_int, [c_void_p, c_int, ctypes.c_char_p, c_size_t, ctypes.c_char_p, c_double]),
    "frd_tcp_add": (c_int, [c_void_p, c_int, ctypes.c_char_p, c_size_t]),
    "frd_tcp_start": (c_int, [c_void_p]),
    "frd_group_reserve": (c_uint64, []),
    "frd_group_unreserve": (None, [c_uint64]),
    "frd_group_open": (c_void_p, [c_void_p, c_uint64, c_int, c_int, POINTER(c_int), POINTER(c_uint64)]),
    "frd_leave": (None, [c_void_p, ctypes.c_char_p]),
    "frd_give_up": (None, [c_void_p]),
    "frd_close": (None, [c_void_p]),
    "frd_set_timeout": (None, [c_void_p, c_double]),
    "frd_set_call_timeout": (None, [c_void_p, c_double]),
    "frd_set_stall_warning": (None, [c_void_p, StallWarning]),
    "frd_get_failure": (None, [c_void_p, POINTER(Failure)]),
    "frd_get_wait": (c_bool, [c_void_p, c_int, POINTER(Call)]),
    "frd_get_call": (None, [c_void_p, c_int, POINTER(Call)]),
    "frd_connect": (None, [c_void_p, c_int]),
    "frd_silence": (c_double, [c_void_p, c_int]),
    "frd_break": (None, [c_void_p, c_int]),
    "frd_tell_broken": (None, [c_void_p]),
    "frd_declare": (c_int, [c_void_p, POINTER(Call), c_int]),
    "frd_undeclare": (None, [c_void_p]),
    "frd_barrier": (c_int, [c_void_p, c_int]),
    "frd_all_reduce": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_all_reduce_to": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_scan": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int]),
    "frd_reduce": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int]),
    "frd_reduce_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int]),
    "frd_reduce_scatter_even": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_all_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int]),
    "frd_all_gather_even": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int]),
    "frd_broadcast": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_all_to_all": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int]),
    "frd_all_to_all_even": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int]),
    "frd_post_send": (c_void_p, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_post_recv": (c_void_p, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int]),
    "frd_send": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int]),
    "frd_recv": (c_int, [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int]),
    "frd_message_test": (c_int, [c_void_p, c_void_p]),
    "frd_message_wait": (c_int, [c_void_p, c_void_p, c_double, c_int]),
    "frd_message_cancel": (None, [c_void_p, c_void_p]),
    "frd_encode": (c_int, [c_int, c_void_p, c_float, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]),
    "frd_decode": (c_int, [c_int, c_void_p, c_void_p, c_float, c_size_t, c_size_t]),
    "frd_orthonormalize": (None, [c_void_p, c_size_t, c_size_t]),
    "frd_outer": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_size_t]),
    "frd_packed_size": (c_size_t, [c_size_t, c_size_t, c_int]),
    "frd_pack": (None, [c_void_p, c_void_p, c_size_t, c_size_t, c_int]),
    "frd_linear": (c_int, [c_void_p] * 5 + [c_size_t] * 3 + [c_int, c_int]),
    "frd_rms_norm": (None, [c_void_p] * 3 + [c_size_t] * 2 + [c_float, c_int]),
    "frd_swiglu": (None, [c_void_p] * 2 + [c_size_t] * 2 + [c_int]),
    "frd_rotate": (None, [c_void_p] * 4 + [c_size_t] * 3 + [c_int64] * 2 + [c_int]),
    "frd_attend": (c_int, [c_void_p] * 6 + [c_size_t] * 7 + [c_int64] * 3 + [c_float, c_int, c_int]),
    "frd_store": (None, [c_void_p] * 6 + [c_size_t] * 6 + [POINTER(c_int64), c_int]),
    "frd_decoder_bytes": (c_size_t, [c_void_p, c_size_t]),
    "frd_decoder_step": (c_int, [c_void_p, c_void_p, c_int]),
}


def available() -> bool:
    """Return whether the ranks of this host can communicate through shared memory."""
    return why_unavailable() is None


@functools.cache
def why_unavailable() -> str | None:
    """Return the reason why the C core is unusable on this machine, or None if it is usable."""
    if not sys.platform.startswith("linux"):
        return f"the C core requires Linux, but this platform is {sys.platform}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this Python lacks os.memfd_create or os.pidfd_open"
    if _path() is None:
        return (
            "the C core was not compiled when the package was installed; install a C compiler and reinstall"
        )
    try:
        os.close(os.memfd_create("farandole-probe"))
        os.close(os.pidfd_open(os.getpid()))
        library()
    except OSError as error:
        return str(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library; raise OSError if it is missing or incompatible."""
    path = _path()
    if path is None:
        raise OSError(
            "the C core of farandole was not compiled; install a C compiler and reinstall the package"
        )
    core = ctypes.CDLL(str(path))
    if core.frd_abi() != ABI:  # another version may lack some of the functions
        raise OSError(
            f"{path.name}: expected interface version {ABI}, got version {core.frd_abi()}; reinstall the package"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(core, name)
        function.restype = result
        function.argtypes = arguments
    _connect_signals(core)
    return core


def vector_level() -> VectorLevel:
    """Return the highest `VectorLevel` that this processor supports."""
    return VectorLevel(library().frd_vector_level())


def raise_pending_interrupt() -> None:
    """Raise the exception that a Python signal handler raised while the core waited.

    Call this function after `Status.INTERRUPTED`.
    """
    kept = [c_void_p(), c_void_p(), c_void_p()]
    library().frd_pending_interrupt(*(ctypes.byref(pointer) for pointer in kept))
    restore = ctypes.pythonapi.PyErr_Restore
    restore.argtypes = [c_void_p] * 3
    restore(*kept)  # sets the exception, which ctypes then raises


def _path() -> Path | None:
    path = Path(__file__).with_name("_core.so")
    return path if path.exists() else None


def _connect_signals(core: ctypes.CDLL) -> None:
    """Allow a waiting main thread to run Python's signal handlers, so that Ctrl-C works in a collective."""
    names = ("PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch")
    core.frd_set_interrupts(*(ctypes.cast(getattr(ctypes.pythonapi, name), c_void_p) for name in names))
