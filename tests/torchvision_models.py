"""Import torchvision without its operators.

The wheel of torchvision is built for CUDA. With torch for the CPU its operators are missing, so the module that
describes the operators to the compiler cannot be imported.  The models need no operators. transformers imports
torchvision, too, so test processes import this module first.
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
