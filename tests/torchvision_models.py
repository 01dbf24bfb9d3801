"""torchvision without its operators.

Its wheel is built for CUDA, so the operators are missing next to torch for the CPU, and the module that describes them to the compiler
cannot be imported.  The models need none of them.  transformers imports torchvision, too, so processes of the tests import this module
before others.
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
