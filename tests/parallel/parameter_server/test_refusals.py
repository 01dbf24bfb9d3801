"""Invalid uses of parameter servers, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from farandole.parallel.parameter_server import ParameterServer
from tests.parallel.odd import world
from tests.parallel.test_optimizers import GlobalNorm


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.1)


class FactoredStates(torch.optim.Adafactor):
    """An optimizer that needs whole tensors; its name is unknown to farandole."""


SHAPED: dict[str, Any] = {"muon": muon, "whole tensors": FactoredStates, "all tensors": GlobalNorm}


def refuse_at_once(rank: int, size: int) -> None:
    for servers in (0, 2, -1):
        with pytest.raises(ValueError, match=f"got servers={servers} with 2 ranks; servers=1 is possible"):
            ParameterServer(world(), servers)
    with pytest.raises(ValueError, match="timeout_s above 0, got 0"):
        ParameterServer(world(), timeout_s=0)
    with pytest.raises(ValueError, match="communicator of a torch process group, got one from split"):
        ParameterServer(world().split(0))
    with ParameterServer(world(), timeout_s=20) as roles:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="expected mode='sync' or 'async', got 'asynchronous'"):
            roles.session(model, sgd, mode="asynchronous")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got SGD; try optimizer=lambda params: "):
            roles.session(model, sgd(list(model.parameters())))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="staleness applies to mode='async'"):
            roles.session(model, sgd, staleness=3)
        with pytest.raises(ValueError, match="staleness of at least 0, or None for no bound, got -1"):
            roles.session(model, sgd, mode="async", staleness=-1)
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            roles.session(model.requires_grad_(False), sgd)


def test_invalid_options_are_refused_immediately(ranks):
    ranks(2).run(refuse_at_once)


def misuse(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    with ParameterServer(world(), timeout_s=20) as roles:
        with roles.session(model, sgd, mode="async") as session:
            if not session.is_worker:
                with pytest.raises(
                    RuntimeError,
                    match=r"rank 0 is a server \(servers: ranks \[0\]\), .* only if session.is_worker",
                ):
                    session.pull()
                return
            with pytest.raises(RuntimeError, match=r"push\(\) must follow a pull\(\)"):
                session.push()
            session.pull()
            for weight in (0.0, -1.0, float("inf"), float("nan")):
                with pytest.raises(ValueError, match="weight"):
                    session.push(weight=weight)
            model(torch.tensor([1])).sum().backward()
            with pytest.raises(ValueError, match="sparse gradients"):
                session.push()
            model[0].weight.grad = None
            session.push()
            with pytest.raises(RuntimeError, match=r"push\(\) must follow a pull\(\)"):
                session.push()
        with pytest.raises(RuntimeError, match="not open"):
            session.pull()


def test_misuse_is_reported_and_has_no_effect(ranks):
    ranks(2).run(misuse)


def open_with(rank: int, size: int, case: str) -> str:
    model = nn.Linear(400, 300 if case != "shapes" or rank != 2 else 301)
    make: Any = SHAPED.get(case, sgd)
    if case == "closure":
        make = torch.optim.LBFGS
    if case == "no return" and rank == 0:
        make = lambda parameters: None  # noqa: E731
    if case == "bad factory" and rank == 0:
        make = lambda parameters: 1 / 0  # noqa: E731
    mode: Any = "async" if case == "modes" and rank == 1 else "sync"
    with ParameterServer(world(), 1 if size == 2 else 2, timeout_s=20) as roles:
        try:
            with roles.session(model, make, mode=mode):
                pass
        except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_server_without_an_optimizer_notifies_the_workers(ranks):
    server, worker = ranks(2).run(open_with, "bad factory")
    assert server == "ZeroDivisionError: division by zero"
    assert worker.startswith(
        "ValueError: the server (rank 0) cannot create its optimizer: division by zero; this worker has"
    )
    server, worker = ranks(2).run(open_with, "closure")
    assert "LBFGS evaluates the model in its step" in server and "LBFGS evaluates" in worker
    server, worker = ranks(2).run(open_with, "no return")
    text = "expected a function that returns an optimizer, got a function that returns NoneType; try `return"
    assert server.startswith(f"TypeError: {text}")
    assert worker.startswith(f"ValueError: the server (rank 0) cannot create its optimizer: {text}")


def test_optimizers_of_matrices_need_whole_tensors(ranks):
    for text in ranks(3).run(open_with, "muon"):
        assert "Muon" in text, text


@pytest.mark.parametrize(
    ("case", "nearest"), [("whole tensors", "session(..., split=False)"), ("all tensors", "one server")]
)
def test_split_tensors_require_an_elementwise_optimizer(ranks, case, nearest):
    for text in ranks(3).run(open_with, case):
        assert "does not update each element independently" in text, text
        assert f"use {nearest}, or an elementwise optimizer" in text, text


@pytest.mark.parametrize(
    ("case", "size", "words"), [("shapes", 3, "120701 parameters"), ("modes", 2, "mode async")]
)
def test_different_session_options_are_reported_on_all_ranks(ranks, case, size, words):
    texts = ranks(size).run(open_with, case)
    assert any("have different session options or model shapes" in text for text in texts)
    assert words in texts[-1]
    assert "no error" not in texts
