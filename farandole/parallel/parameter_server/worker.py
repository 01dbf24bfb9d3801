"""The worker's side of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from farandole.comm.errors import RankLate
from farandole.parallel.parameter_server.channel import Channel, Header, Kind, Plan, in_order
from farandole.parallel.parameter_server.errors import ServerLost
from farandole.parallel.parameter_server.layout import Packing


class Worker:
    """Transfers parameters and gradients between a model and the servers connected by `channels`.

    Raises:
        ServerLost: in every method, if a server died or does not respond.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], packings: Sequence[Packing], channels: Sequence[Channel]
    ) -> None:
        self.version = [0] * len(channels)
        """The version of the model's parameters, for each server."""
        self._parameters = parameters
        self._packings = packings
        self._channels = channels
        self._buffers = [packing.buffers() for packing in packings]
        self._views = [
            packing.views(buffers) for packing, buffers in zip(packings, self._buffers, strict=True)
        ]

    def begin(self, plan: Plan) -> None:
        """Begin the session.

        Raises:
            ValueError: if a server has different session options or cannot start.
        """
        for server in self._each(Header(Kind.HELLO, plan.fingerprint)):
            with self._blaming(server):
                answer = self._channels[server].receive()
                if answer.kind is Kind.REFUSED:
                    reason = self._channels[server].receive_text()
                    raise ValueError(f"{reason}; this worker has {plan.summary}")

    def pull(self, kind: Kind = Kind.PULL) -> None:
        """Receive the latest parameters, and copy them to the model.

        This method waits until every server has sent its parameters.

        Args:
            kind: PULL, or FINISH to wait for the final parameters.
        """
        for server in self._each(Header(kind)):
            with self._blaming(server):
                self._await_parameters(server)

    def push(self, weight: float) -> None:
        """Send the model's gradients, and return when they can be overwritten."""
        for server, packing in enumerate(self._packings):
            has = []
            for piece, view in zip(packing.pieces, self._views[server], strict=True):
                gradient = self._parameters[piece.parameter].grad
                has.append(gradient is not None)
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(packing.part(piece, gradient))
            header = Header(Kind.PUSH, version=self.version[server], weight=weight)
            with self._blaming(server):
                self._channels[server].send(
                    header, [torch.tensor(has, dtype=torch.bool), *self._packed(server)]
                )

    def finish(self) -> None:
        """Finish the session: receive the final parameters, and disconnect."""
        self.pull(Kind.FINISH)
        for _ in self._each(Header(Kind.LEAVE)):
            pass

    def _await_parameters(self, server: int) -> None:
        channel, packing = self._channels[server], self._packings[server]
        while True:
            header = channel.receive()
            match header.kind:
                case Kind.PARAMETERS:
                    channel.receive_into(self._packed(server))
                    self.version[server] = header.version
                    self._copy(packing, self._views[server], to_model=True)
                    return
                case Kind.WANTED:
                    self._copy(packing, self._views[server], to_model=False)
                    channel.send(Header(Kind.PARAMETERS), self._packed(server))
                case _:  # WAIT: also tell the other servers that this worker is alive and waiting
                    for _ in self._each(Header(Kind.ALIVE)):
                        pass

    def _copy(self, packing: Packing, views: Sequence[Tensor], *, to_model: bool) -> None:
        with torch.no_grad():
            for piece, view in zip(packing.pieces, views, strict=True):
                parameter = self._parameters[piece.parameter]
                if not to_model:
                    view.copy_(packing.part(piece, parameter))
                elif piece.whole:
                    parameter.copy_(view)
                else:
                    parameter.view(-1)[piece.start : piece.stop].copy_(view)

    def _packed(self, server: int) -> list[Tensor]:
        return in_order(self._buffers[server])

    def _each(self, header: Header) -> Iterable[int]:
        """Send a header to every server, and return the indices of the servers."""
        for server, channel in enumerate(self._channels):
            with self._blaming(server):
                channel.send(header)
        return range(len(self._channels))

    def _blaming(self, server: int) -> _Blame:
        return _Blame(server, self._channels)


class _Blame:
    """Raises `ServerLost` on exit if the connection to `server` failed, and notifies the other servers."""

    def __init__(self, server: int, channels: Sequence[Channel]) -> None:
        self._server = server
        self._channels = channels

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, ServerLost):
            return
        text = f"server {self._server} (rank {self._channels[self._server].peer}) is lost: {error}"
        for server, channel in enumerate(self._channels):
            # this worker may have been late, in which case the others continue without it
            if server != self._server and not isinstance(error, RankLate):
                with contextlib.suppress(RuntimeError):  # this server may be lost too
                    channel.send_text(Kind.LOST, text)
        raise ServerLost(text) from error
