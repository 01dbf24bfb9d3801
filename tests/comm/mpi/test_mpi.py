"""The backend `farandole-mpi` under mpiexec: the checks of the shared-memory backend, and checks of its own.

The checks of the shared-memory backend are imported from its tests, and run in a job of 2 ranks and a job of 3 ranks.
"""

from __future__ import annotations

import json

import pytest

from tests.comm.mpi.job import Check, needs_mpi, outcomes
from tests.comm.test_backend_collectives import free_bytes

OWN, API = "tests.comm.mpi.checks", "tests.comm.test_communicator"
COLLECTIVES, SPELLINGS = "tests.comm.test_backend_collectives", "tests.comm.test_backend_spellings"
GROUPS, MESSAGES = "tests.comm.test_backend_groups", "tests.comm.test_backend_messages"
DDP, TORCH = "tests.comm.test_backend_ddp", "tests.comm.test_backend_torch"

ON_TWO: list[Check] = [
    (OWN, "random_collectives", [1, 12]),
    (OWN, "every_reduction", []),
    (OWN, "special_floats", []),
    (OWN, "complex_sums", []),
    (OWN, "tags_without_order", []),
    (OWN, "transport", []),
    (OWN, "wrong_sizes", []),
    ("tests.comm.test_overlaps", "check_on_this_host", [False]),
    (COLLECTIVES, "check_kinds", []),
    (COLLECTIVES, "check_shapes_beyond_gloo", []),
    (COLLECTIVES, "check_reduce_in_place", []),
    (COLLECTIVES, "check_async_collective_tensor", []),
    (COLLECTIVES, "check_refusals", []),
    (COLLECTIVES, "check_sparse", []),
    (SPELLINGS, "check_calls", []),
    (GROUPS, "check_sub_groups", []),
    (GROUPS, "check_interleaved", []),
    (GROUPS, "check_threads", []),
    (GROUPS, "check_callbacks_that_communicate", []),
    (GROUPS, "check_many_async", []),
    (GROUPS, "check_work_api", []),
    (MESSAGES, "check_both_directions", []),
    (MESSAGES, "check_receives_first", []),
    (MESSAGES, "check_batch", []),
    (MESSAGES, "check_any_source", []),
    (MESSAGES, "check_progress_while_nobody_waits", []),
    (MESSAGES, "check_futures_and_results", []),
    (MESSAGES, "check_works_from_threads", []),
    (MESSAGES, "check_unwaited", []),
    (DDP, "check_variants", []),
    (DDP, "check_powersgd", []),
    (DDP, "check_no_sync", []),
    (TORCH, "check_fsdp2", []),
    (TORCH, "check_fsdp1", []),
    (TORCH, "check_dtensor", []),
    (TORCH, "check_tensor_parallel", []),
    (TORCH, "check_meshes", []),
    (TORCH, "check_functional", []),
    (TORCH, "check_pipelines", []),
    ("tests.comm.test_hosts", "reductions", [[0, 1], {"transport": "mpi"}, 3]),
    ("tests.comm.test_hosts", "movements", [[0, 1], {"transport": "mpi"}, 3]),
    (OWN, "over_mpi4py", []),
    (API, "check_persistent", [1]),
    (API, "check_uneven", []),
    (API, "check_scan", []),
    (API, "check_out_of_place", []),
    (API, "check_arrays", []),
    (API, "check_objects", []),
    (API, "check_messages", []),
    (API, "check_invalid", []),
    (OWN, "deadlines", []),
    (OWN, "late_messages", []),
]
ON_THREE: list[Check] = [
    (OWN, "every_reduction", []),
    (OWN, "special_floats", []),
    (OWN, "transport", []),
    (OWN, "over_mpi4py", []),
    (API, "check_uneven", []),
    (API, "check_splits_with_different_histories", []),
    (SPELLINGS, "check_calls", []),
    (GROUPS, "check_sub_groups", []),
    (MESSAGES, "check_any_source", []),
    (OWN, "deadlines", []),
    (OWN, "late_messages", []),
]
CASES = [(size, i, checks) for size, checks in ((2, ON_TWO), (3, ON_THREE)) for i in range(len(checks))]


@needs_mpi
@pytest.mark.parametrize(
    ("size", "number", "checks"), CASES, ids=[f"{size}-{checks[i][1]}" for size, i, checks in CASES]
)
def test_over_mpi(size: int, number: int, checks: list[Check]) -> None:
    found, errors = outcomes(size, json.dumps(checks))
    outcome = found.get(str(number))
    assert outcome is not None, f"the job ended before this check:\n{errors[-3000:]}"
    assert not outcome, outcome


@needs_mpi
@pytest.mark.slow
def test_counts_beyond_32_bits() -> None:
    if free_bytes() < 12 * 2**30:
        pytest.skip("less than 12 GiB of memory are free")
    found, errors = outcomes(2, json.dumps([(OWN, "large_counts", [2**31 + 7])]))
    assert found.get("0") == "", found.get("0") or errors
