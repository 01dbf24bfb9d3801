"""The order of samples: each once per epoch, on one rank only, and the same after resuming."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data.sampler import Sampler, permute

SEEDS = st.integers(0, 2**63 - 1)


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 50))
def test_permutation_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 500), seed=SEEDS, ranks=st.integers(1, 5), share=st.integers(1, 7))
def test_ranks_have_disjoint_samples_in_an_epoch(size: int, seed: int, ranks: int, share: int) -> None:
    samplers = [Sampler(size, seed) for _ in range(ranks)]
    batch, seen = ranks * share, []
    for _ in range(-(-size // batch)):
        for rank, sampler in enumerate(samplers):
            seen += sampler.next(batch, rank, ranks).tolist()
    assert sorted(seen[:size]) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 500), seed=SEEDS, steps=st.integers(1, 20), stop=st.integers(0, 20))
def test_resumed_sampler_continues_with_the_next_samples(size: int, seed: int, steps: int, stop: int) -> None:
    whole = Sampler(size, seed)
    expected = [whole.next(6, 1, 3).tolist() for _ in range(stop + steps)]
    first = Sampler(size, seed)
    for _ in range(stop):
        first.next(6, 1, 3)
    resumed = Sampler(size, seed, consumed=first.consumed)
    assert [resumed.next(6, 1, 3).tolist() for _ in range(steps)] == expected[stop:]


@settings(deadline=None)
@given(seed=SEEDS, ranks=st.sampled_from([1, 2, 3, 6]))
def test_samples_of_a_step_do_not_depend_on_ranks(seed: int, ranks: int) -> None:
    whole = Sampler(100, seed).next(6, 0, 1).tolist()
    parts = [Sampler(100, seed).next(6, rank, ranks).tolist() for rank in range(ranks)]
    assert sum(parts, []) == whole


def test_epochs_of_positions() -> None:
    sampler = Sampler(5, 0)
    positions = sampler.take(12, 0, 1)
    assert sampler.epochs(positions).tolist() == [0] * 5 + [1] * 5 + [2] * 2
    assert sampler.at(positions).tolist() == Sampler(5, 0).next(12, 0, 1).tolist()
    assert sampler.consumed == 12


def test_order_depends_on_epoch_and_seed() -> None:
    orders = [permute(np.arange(1000), 1000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (orders[a] == orders[b]).mean() < 0.02
    assert (orders[0] == np.arange(1000)).mean() < 0.02


def test_a_billion_samples() -> None:
    taken = Sampler(10**9, 0, consumed=10**12).next(4, 0, 1)
    assert len(set(taken.tolist())) == 4
    assert ((taken >= 0) & (taken < 10**9)).all()


def test_uneven_shares_and_empty_data_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"expected the number of samples to be a multiple of the number of ranks \(2\), got 7",
    ):
        Sampler(10, 0).next(7, 0, 2)
    with pytest.raises(ValueError, match="at least one sample"):
        Sampler(0, 0)
