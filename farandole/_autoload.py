"""What torch finds through the entry points `torch.backends` and `torch.distributed.backends`.

It makes `torch.distributed.init_process_group("farandole")` work in a program that never imports this
package.  It runs at `import torch`, so it only leaves a name behind; the rest loads when a group is made.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make the backend `farandole` known to `torch.distributed` (again is harmless)."""
    import torch.distributed as dist

    if dist.is_available() and "FARANDOLE" not in dist.Backend._plugins:
        dist.Backend.register_backend("farandole", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from farandole.comm.backend import create

    return create(options, backend_options)
