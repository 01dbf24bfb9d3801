"""Test the division of cores among ranks, and the line that describes the division."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.cores import divide_cores, physical_cores

EIGHT = [(core,) for core in range(8)]


@given(cores=st.integers(1, 64), threads=st.integers(1, 4), ranks=st.integers(1, 80))
def test_each_processor_gets_the_same_number_of_ranks(cores, threads, ranks):
    units = [tuple(core + cores * t for t in range(threads)) for core in range(cores)]
    shares = divide_cores(ranks, units).shares
    given_out = [p for share in shares for p in share.processors]
    assert len(shares) == ranks
    assert all(share.threads >= 1 for share in shares)
    if given_out:
        times = max(1, ranks // (cores * threads))
        assert sorted(given_out) == sorted(times * [p for unit in units for p in unit])
        assert max(len(s.processors) for s in shares) - min(len(s.processors) for s in shares) <= threads


def test_two_ranks_on_two_cores():
    division = divide_cores(2, EIGHT[:2])
    assert [share.processors for share in division.shares] == [(0,), (1,)]
    assert division.summary == (
        "2 ranks on 2 cores: 1 thread each, pinned (rank 0: core 0, rank 1: core 1); --no-pin turns pinning off"
    )


def test_hardware_threads_stay_with_their_core():
    cores = [(0, 4), (1, 5), (2, 6), (3, 7)]
    division = divide_cores(2, cores)
    assert [share.processors for share in division.shares] == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert [share.threads for share in division.shares] == [2, 2]
    assert "rank 0: cores 0-1,4-5" in division.summary


def test_hardware_threads_are_divided_if_there_are_fewer_cores_than_ranks():
    division = divide_cores(4, [(0, 2), (1, 3)])
    assert [share.processors for share in division.shares] == [(0,), (2,), (1,), (3,)]


def test_several_ranks_on_each_core():
    division = divide_cores(4, EIGHT[:2])
    assert [(share.threads, share.processors) for share in division.shares] == [(1, (0,))] * 2 + [
        (1, (1,))
    ] * 2
    assert "rank 0: core 0, rank 1: core 0, rank 2: core 1, rank 3: core 1" in division.summary


def test_ranks_that_do_not_divide_evenly_are_not_pinned():
    division = divide_cores(3, EIGHT[:2])
    assert all(share.threads == 1 and not share.processors for share in division.shares)
    assert division.summary.endswith("not pinned: 3 ranks cannot be divided evenly among 2 cores")


def test_oversubscribed_ranks_are_not_pinned_next_to_another_job():
    division = divide_cores(4, EIGHT[:2], reserved={1})
    assert not any(share.processors for share in division.shares)
    assert division.summary.endswith(
        "not pinned: other jobs have reserved 1 core; see 'farandole explain not-pinned-other-jobs'"
    )


def test_ranks_are_not_pinned_on_request():
    division = divide_cores(2, EIGHT, pin=False)
    assert [(share.threads, share.processors) for share in division.shares] == [(4, ()), (4, ())]
    assert division.summary == "2 ranks on 8 cores: 4 threads each, not pinned"


def test_one_rank_is_not_pinned():
    assert divide_cores(1, EIGHT).summary == "1 rank on 8 cores: 8 threads"


def test_the_number_of_threads_can_be_set():
    division = divide_cores(2, EIGHT, threads=3)
    assert [share.threads for share in division.shares] == [3, 3]


def test_a_quota_limits_threads_and_prevents_pinning():
    division = divide_cores(2, EIGHT, quota=4.0)
    assert [(share.threads, share.processors) for share in division.shares] == [(2, ()), (2, ())]
    assert "a quota limits processor time" in division.summary


def test_uneven_division_gives_every_rank_the_same_threads():
    division = divide_cores(3, EIGHT)
    assert [share.processors for share in division.shares] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert {share.threads for share in division.shares} == {2}


def test_physical_cores_within_a_mask():
    siblings = {0: {0, 4}, 4: {0, 4}, 1: {1, 5}, 5: {1, 5}}
    found = physical_cores(frozenset({0, 4, 5}), lambda p: frozenset(siblings[p]))
    assert found == [(0, 4), (5,)]


def test_reserved_cores_are_not_divided():
    division = divide_cores(2, EIGHT[:4], reserved={0, 1})
    assert [share.processors for share in division.shares] == [(2,), (3,)]
    assert division.summary.startswith("2 ranks on 2 free cores: 1 thread each, pinned (rank 0: core 2,")


def test_a_core_with_a_reserved_thread_is_not_free():
    division = divide_cores(1, [(0, 2), (1, 3)], reserved={2})
    assert [share.processors for share in division.shares] == [(1, 3)]


def test_without_enough_free_cores_no_rank_is_pinned():
    division = divide_cores(2, EIGHT[:2], reserved={1})
    assert division.processors == frozenset()
    assert division.summary == (
        "2 ranks on 2 cores: 1 thread each, not pinned: other jobs have reserved 1 core; "
        "see 'farandole explain not-pinned-other-jobs'"
    )


def test_without_pinning_reservations_do_not_matter():
    assert divide_cores(2, EIGHT[:2], pin=False, reserved={0, 1}).summary.endswith(
        "1 thread each, not pinned"
    )
