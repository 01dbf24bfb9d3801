"""Test the memory tracker: live memory, and the memory that a C library keeps."""

from __future__ import annotations

import torch

from farandole.memory.tracker import MemoryTracker

MIB = 1 << 20


def test_peaks_of_small_and_large_blocks_add_up_in_the_resident_peak() -> None:
    with MemoryTracker([]) as tracker:
        small = [torch.empty(10 * MIB, dtype=torch.uint8) for _ in range(3)]
        assert tracker.now == 30 * MIB
        del small
        large = torch.empty(40 * MIB, dtype=torch.uint8)
        assert tracker.now == 40 * MIB
        del large
    assert tracker.now == 0 and tracker.peak == 40 * MIB
    assert tracker.resident_peak == 70 * MIB


def test_live_memory_is_counted_once() -> None:
    outside = torch.empty(8)
    with MemoryTracker([outside]) as tracker:
        first, second = torch.empty(256), torch.empty(512)
        views = [first.view(16, 16), outside.view(4, 2)]
        assert sorted(tracker.live().values()) == [1024, 2048]
        assert list(tracker.live(2000).values()) == [2048]
        assert list(tracker.live(without=[second]).values()) == [1024]
        del first
        assert len(tracker.live()) == 2  # a view still exists
        views.clear()
        assert list(tracker.live().values()) == [2048]
