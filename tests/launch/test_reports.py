"""Test that the cause of a failure is distinguished from consequences, and printed once."""

from __future__ import annotations

from farandole.launch.reports import (
    ErrorReport,
    RankFailure,
    describe_slow_stop,
    exit_status,
    explain_failures,
    find_cause,
)


def raised(rank, when, kind="ValueError", message="bad", consequence=False, status=1):
    trace = f"Traceback (most recent call last):\n  ...\n{kind}: {message}\n"
    report = ErrorReport(kind, message, trace, consequence, when)
    return RankFailure(rank, 100 + rank, status, when, report)


def test_a_communication_error_is_not_the_cause_even_if_it_came_first():
    late = raised(0, 1.0, "RankLeft", consequence=True)
    cause = raised(1, 2.0)
    assert find_cause([late, cause]) is cause
    text = explain_failures([late, cause])
    assert text.startswith("rank 1 (pid 101) failed:\n\nTraceback")
    assert text.endswith("Rank 0 then failed with RankLeft.")
    assert text.count("Traceback") == 1


def test_a_single_communication_error_is_the_cause():
    only = raised(0, 1.0, "RankLate", consequence=True)
    stopped = RankFailure(1, 101, -15, 2.0, stopped=True)
    assert find_cause([only, stopped]) is only
    assert explain_failures([only, stopped]).endswith("Rank 1 was stopped.")


def test_a_killed_rank_comes_with_a_hint():
    killed = RankFailure(1, 123, -9, 5.0)
    consequence = raised(0, 4.9, "RankDied", consequence=True)
    text = explain_failures([consequence, killed])
    assert text.startswith("rank 1 (pid 123) was killed by SIGKILL")
    assert "memory ran out" in text
    assert exit_status(killed) == 137


def test_the_same_error_everywhere_is_shown_once():
    text = explain_failures([raised(rank, float(rank)) for rank in range(4)])
    assert text.count("ValueError: bad") == 1
    assert "The same happened on ranks 1 to 3." in text


def test_an_exit_status_without_a_message():
    ended = RankFailure(2, 55, 7, 1.0)
    stopped = [RankFailure(rank, rank, -15, 2.0, stopped=True) for rank in (0, 1, 3)]
    assert explain_failures([ended, *stopped]) == (
        "rank 2 (pid 55) ended with exit status 7\nRanks 0, 1 and 3 were stopped."
    )
    assert exit_status(ended) == 7


def test_many_failures_are_summarized():
    failures = [raised(0, 0.0)] + [raised(r, 1.0 + r, "RankDied", consequence=True) for r in range(1, 6)]
    # ranks 1 to 5 have equal reports, which differ from the cause's report
    assert explain_failures(failures).splitlines()[-1] == (
        "Rank 1 then failed with RankDied; rank 2 then failed with RankDied; ranks 3 to 5 also failed."
    )


def test_ranks_that_are_slow_to_stop_are_named():
    limits = "(killed after 60 s; a second signal kills {} immediately)"
    assert describe_slow_stop([1], 60.0) == f"waiting for rank 1 to stop {limits.format('it')}"
    assert describe_slow_stop([0, 1], 60.0) == f"waiting for ranks 0 and 1 to stop {limits.format('them')}"
