"""Communicators for collectives and messages, and the `torch.distributed` backend `farandole`."""

from farandole._autoload import register
from farandole.comm.communicator import Communicator
from farandole.comm.errors import CallMismatch, CommunicationError, RankDied, RankLate, RankLeft
from farandole.comm.options import Options

__all__ = [
    "CallMismatch",
    "CommunicationError",
    "Communicator",
    "Options",
    "RankDied",
    "RankLate",
    "RankLeft",
    "register",
]
