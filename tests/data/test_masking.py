"""BERT's masking: exact shares, no special tokens, and masks that do not depend on ranks or batches."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from farandole.data.errors import DataError
from farandole.data.masking import IGNORE_INDEX, MaskedBatches, Masking, masking_for
from farandole.data.sampler import Sampler
from farandole.data.text import Windows, prepare_text
from farandole.data.tokenizer import END_OF_TEXT, MASK, PAD, train_tokenizer

VOCABULARY, END, MASKED, PADDED = 1000, 0, 1, 2
SEEDS = st.integers(0, 2**63 - 1)


def _masking(seed: int = 0, **changes: object) -> Masking:
    options = {"vocabulary": VOCABULARY, "mask_token": MASKED, "special": (END, PADDED), "seed": seed}
    return Masking(**(options | changes))  # type: ignore[arg-type]


def _windows(samples: int, positions: int, special_share: float = 0.1, seed: int = 0) -> NDArray[np.int64]:
    random = np.random.default_rng(seed)
    windows = random.integers(3, VOCABULARY, (samples, positions))
    special = random.random(windows.shape) < special_share
    windows[special] = random.choice([END, PADDED], int(special.sum()))
    return windows


@settings(deadline=None)
@given(
    seed=SEEDS,
    samples=st.integers(1, 150),
    positions=st.integers(1, 70),
    special=st.sampled_from([0.0, 0.3, 0.97, 1.0]),
    share=st.sampled_from([0.15, 0.5, 1.0, 1e-9]),
)
def test_every_window_has_the_exact_share_of_targets(
    seed: int, samples: int, positions: int, special: float, share: float
) -> None:
    windows = _windows(samples, positions, special, seed % 1000)
    before = windows.copy()
    inputs, targets = _masking(seed, share=share).mask(windows, np.arange(samples))
    assert (windows == before).all()
    chosen = targets != IGNORE_INDEX
    many = (windows > 2).sum(1)
    expected = np.where(many > 0, np.maximum(1, np.rint(share * many)), 0)
    assert (chosen.sum(1) == expected).all()
    assert (targets[chosen] == windows[chosen]).all()
    assert (targets[chosen] > 2).all()
    assert (inputs[~chosen] == windows[~chosen]).all()
    assert ((inputs[chosen] == MASKED) | (inputs[chosen] > 2)).all()


@settings(deadline=None, max_examples=50)
@given(
    seed=SEEDS,
    samples=st.integers(1, 90),
    share=st.integers(1, 4),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 12]),
    steps=st.integers(1, 6),
)
def test_masks_do_not_depend_on_ranks_or_resuming(
    seed: int, samples: int, share: int, ranks: int, steps: int
) -> None:
    windows = Windows(_windows(1, samples * 9 + 1, seed=seed % 1000)[0].astype(np.uint16), 9)
    batch = 12 * share
    alone = MaskedBatches(windows, _masking(seed), Sampler(samples, seed))
    expected = [alone.next(batch, 0, 1) for _ in range(steps)]  # often crosses the end of an epoch
    parts = []
    for rank in range(ranks):
        mine = MaskedBatches(windows, _masking(seed), Sampler(samples, seed, consumed=batch * (steps - 1)))
        parts.append(mine.next(batch, rank, ranks))
    for side in (0, 1):
        assert (np.concatenate([part[side] for part in parts]) == expected[-1][side]).all()


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, order=st.permutations(range(20)), epoch=st.integers(0, 2**40))
def test_masks_do_not_depend_on_the_batch(seed: int, order: list[int], epoch: int) -> None:
    windows, masking = _windows(20, 33), _masking(seed)
    whole = masking.mask(windows, np.arange(20), epoch)
    shuffled = masking.mask(windows[order], np.array(order), np.full(20, epoch))
    single = masking.mask(windows[order[:1]], np.array(order[:1]), epoch)
    for side in (0, 1):
        assert (shuffled[side] == whole[side][order]).all()
        assert (single[side] == whole[side][order[:1]]).all()


def test_chosen_tokens_are_masked_replaced_or_kept_at_80_10_10() -> None:
    windows = _windows(4000, 128, special_share=0)
    inputs, targets = _masking().mask(windows, np.arange(len(windows)))
    chosen = targets != IGNORE_INDEX
    total = chosen.sum()
    assert total == len(windows) * 19  # round(0.15 * 128)
    masked, kept = (inputs == MASKED) & chosen, (inputs == targets) & chosen
    deviation = (0.1 * 0.9 / total) ** 0.5
    assert masked.sum() / total == pytest.approx(0.8, abs=6 * deviation)
    assert kept.sum() / total == pytest.approx(0.1 * (1 + 1 / 997), abs=5 * deviation)
    others = inputs[chosen & ~masked & ~kept]
    counts = np.bincount(others, minlength=VOCABULARY)[3:]
    # chi-squared of 996 degrees of freedom: within five deviations of its mean
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert abs(statistic - 996) < 5 * (2 * 996) ** 0.5


def test_positions_are_chosen_uniformly_and_independently() -> None:
    windows = _windows(6000, 40, special_share=0)
    chosen = _masking().mask(windows, np.arange(len(windows)))[1] != IGNORE_INDEX
    share = 6 / 40
    deviation = (share * (1 - share) / len(windows)) ** 0.5
    assert np.abs(chosen.mean(0) - share).max() < 5 * deviation
    together = (chosen[:, :-1] & chosen[:, 1:]).mean(0)  # two of six: hypergeometric
    expected = 6 * 5 / (40 * 39)
    assert np.abs(together - expected).max() < 5 * (expected / len(windows)) ** 0.5


def test_masks_depend_on_seed_epoch_and_sample() -> None:
    windows = np.tile(_windows(1, 200, special_share=0), (300, 1))
    samples = np.arange(300)
    base = _masking().mask(windows, samples)[1] != IGNORE_INDEX
    for other in (
        _masking(1).mask(windows, samples),
        _masking().mask(windows, samples, 1),
        _masking().mask(windows, samples + 1),
    ):
        both = (base & (other[1] != IGNORE_INDEX)).sum() / base.sum()
        assert both == pytest.approx(0.15, abs=0.02)


def test_masks_do_not_depend_on_copies_or_token_types() -> None:
    windows = _windows(5, 50)
    masking = _masking()
    expected = masking.mask(windows, np.arange(5))
    got = copy.deepcopy(masking).mask(windows.astype(np.uint16), np.arange(5))
    for one, two in zip(expected, got, strict=True):
        assert one.dtype == two.dtype == np.int64
        assert (one == two).all()
    for empty in (np.zeros((0, 7), np.uint16), np.zeros((3, 0), np.uint16)):
        inputs, targets = masking.mask(empty, np.arange(len(empty)))
        assert inputs.shape == targets.shape == empty.shape


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="expected tokens from 0 to 999, got 1000"):
        _masking(special=(1000,))
    with pytest.raises(ValueError, match="share above 0 and at most 1, got 15"):
        _masking(share=15)
    with pytest.raises(ValueError, match="got nan"):
        _masking(share=float("nan"))
    with pytest.raises(ValueError, match="expected at least one ordinary token"):
        _masking(vocabulary=3)
    with pytest.raises(ValueError, match="expected a non-negative seed, got -1"):
        _masking(-1)
    with pytest.raises(ValueError, match="expected tokens from 0 to 999, got 1000"):
        _masking().mask(np.array([[5, 1000]]), np.array([0]))
    with pytest.raises(ValueError, match="expected tokens from 0 to 999, got -1"):
        _masking().mask(np.array([[5, -1]]), np.array([0]))
    with pytest.raises(ValueError, match=r"got shapes \(2, 3\) and \(3,\)"):
        _masking().mask(_windows(2, 3), np.arange(3))
    with pytest.raises(ValueError, match="at most 3 windows, got a sampler for 5 samples"):
        MaskedBatches(Windows(np.zeros(10, np.uint16), 3), _masking(), Sampler(5, 0))


def test_masks_prepared_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question: [MASK]\n" * 200)
    text = prepare_text(
        str(tmp_path), vocabulary=300, context=16, special_tokens=(MASK, PAD), cache=tmp_path / "c"
    )
    masking = masking_for(text.tokenizer, seed=3)
    assert (masking.mask_token, masking.special) == (1, (0, 1, 2))
    assert masking.vocabulary == text.tokenizer.get_vocab_size() < 300  # the text is too small for 300 tokens
    batches = MaskedBatches(text.train, masking, Sampler(text.train.samples, seed=0))
    inputs, targets = batches.next(8, 0, 2)
    assert inputs.shape == targets.shape == (4, 16)
    assert batches.sampler.consumed == 8
    restored = np.where(targets == IGNORE_INDEX, inputs, targets)
    assert (restored == text.train.read(Sampler(text.train.samples, 0).next(8, 0, 2))[:, :-1]).all()


def test_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(DataError, match=r"no mask token '\[MASK\]'; .*special_tokens=\('\[MASK\]',\)"):
        masking_for(train_tokenizer(["some text"], 257), seed=0)
    assert END_OF_TEXT in train_tokenizer(["some text"], 257).get_vocab()
