"""ZeRO stages and backends for tests of a feature that does not depend on the transport.

With Gloo, ranks share no memory, so stage 3 gathers the weights of each block.  `test_zero.py` trains in all stages
with both backends; other tests use Gloo in stage 3, and in all stages if they are slow tests.
"""

from __future__ import annotations

import pytest

STAGES_AND_BACKENDS = [
    *((zero, "farandole") for zero in range(4)),
    (3, "gloo"),
    *(pytest.param(zero, "gloo", marks=pytest.mark.slow) for zero in range(3)),
]
