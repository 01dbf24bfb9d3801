"""Import torchvision without its operators.

The torchvision wheel is built for CUDA.  With a CPU build of torch, its operators are missing, so the module that
registers operators for the compiler cannot be imported.  The models do not need these operators.  transformers imports
torchvision too, so test processes import this module first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_DESCRIPTIONS = "torchvision._meta_registrations"
sys.modules.setdefault(_DESCRIPTIONS, ModuleType(_DESCRIPTIONS))


def torchvision_models() -> Any:
    """Return `torchvision.models`."""
    from torchvision import models

    return models
