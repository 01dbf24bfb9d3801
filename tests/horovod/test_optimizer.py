"""Compare DistributedOptimizer with SGD in one process on the whole batch; test invalid arguments."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole.horovod.torch as hvd
from tests.horovod.jobs import close, session

SHARE, STEPS = 3, 4


class Net(nn.Module):
    """A network with a scalar, a frozen parameter, an unused parameter and a parameter that only rank 0 uses."""

    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(13, 5, sparse=sparse)
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.second = nn.Linear(7, 13, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.never = nn.Parameter(torch.ones(2))
        self.sometimes = nn.Parameter(torch.ones(5))

    def forward(self, tokens, use=True):
        hidden = self.embedding(tokens)
        if use:
            hidden = hidden * self.sometimes
        return self.second(self.frozen(torch.tanh(self.first(hidden)))) * self.scale


def net(sparse=False):
    torch.manual_seed(1)
    return Net(sparse)


def batch(step, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 13, (SHARE * size, 4), generator=generator)


def loss_of(model, tokens, use=True):
    return F.cross_entropy(model(tokens, use).flatten(0, 1), tokens.roll(1, -1).flatten())


def alone(size, passes=1, op=None, sparse=False, momentum=0.9):
    """Train in one process.  The loss of a pass is the mean of the ranks' losses (the sum for op=Sum)."""
    model = net(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(passes):
            shares = batch(step * passes + each, size).split(SHARE)
            losses = [loss_of(model, tokens, use=rank == 0) for rank, tokens in enumerate(shares)]
            total = torch.stack(losses).sum()
            (total if op == hvd.Sum else total / size).backward()
        for parameter in model.parameters():  # as in Horovod, the gradient of an unused parameter is zero
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(rank, size, passes=1, sparse=False, momentum=0.9, names=True, **options):
    model = net(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if "groups" in options and not isinstance(options["groups"], int):
        options["groups"] = [[model.get_parameter(name) for name in group] for group in options["groups"]]
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters() if names else None,
        backward_passes_per_step=passes,
        **options,
    )
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(passes):
            tokens = batch(step * passes + each, size).split(SHARE)[rank]
            loss_of(model, tokens, use=rank == 0).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(result, expected, tolerance=1e-5):
    for name, value in expected.items():
        torch.testing.assert_close(
            result[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def parity(rank, size):
    with session():
        for options in (
            {},
            {"names": False},
            {"passes": 3},
            {"gradient_predivide_factor": 4.0},
            {"groups": 2},
            {"groups": 100, "passes": 2},
            {"groups": [["first.weight", "scale"], ["second.weight"]], "gradient_predivide_factor": 2.0},
            {"op": hvd.Sum},
        ):
            expected = alone(size, options.get("passes", 1), options.get("op"))
            same(train(rank, size, **options), expected)
        same(train(rank, size, compression=hvd.Compression.bf16), alone(size), 2e-2)
        same(train(rank, size, compression=hvd.Compression.fp16), alone(size), 5e-3)
        for as_dense in (False, True):
            options = {"sparse": True, "momentum": 0.0}
            same(train(rank, size, sparse_as_dense=as_dense, **options), alone(size, **options))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parameters_equal_those_of_one_process(ranks, size):
    ranks(size).run(parity)


def test_parameters_equal_those_of_one_process_through_gloo(ranks):
    ranks(2, "gloo").run(parity)


def refusals(rank, size):
    with session():
        model = nn.Linear(2, 2)

        def wrap(**options):
            return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

        named = list(model.named_parameters())
        for options, words in [
            ({"named_parameters": model.parameters()}, "sequence of tuples"),
            ({"named_parameters": [("a", p) for _, p in named]}, "must be unique. Found duplicates: a"),
            (
                {"named_parameters": named[:1]},
                r"1 of the 2 parameters .* not named; shapes of these parameters: \[2\]",
            ),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
            ({"gradient_predivide_factor": 0}, "must be positive"),
            ({"backward_passes_per_step": 0}, "must be 1 or more"),
            ({"groups": 0}, "positive integer or a list"),
            ({"groups": "all"}, "positive integer or a list"),
            ({"groups": [["weight"]]}, "expected lists of tensors, got a list with str"),
            ({"groups": [[model.weight], [model.weight]]}, "only appear once"),
            ({"op": 9}, "use one of hvd"),
            ({"compression": "fp16"}, "Compression.none, fp16 or bf16, got 'fp16'"),
            ({"op": hvd.Adasum, "groups": 2}, "not supported with op=Adasum"),
        ]:
            with pytest.raises(ValueError, match=words):
                wrap(**options)

        for op in (hvd.Average, hvd.Adasum):
            with pytest.raises(ValueError, match="SGD is already a DistributedOptimizer"):
                hvd.DistributedOptimizer(wrap(op=op))

        optimizer = wrap(named_parameters=named)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        with pytest.raises(AssertionError, match="zero_grad.* was called after loss.backward"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.warns(DeprecationWarning, match="groups"):
            wrap(num_groups=1)


def test_invalid_arguments_are_refused(ranks):
    ranks(2).run(refusals)


def common_usage(rank, size):
    """Use clipping, schedulers, state dicts, closures and changes of backward_passes_per_step."""
    with session():
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.5)
        early = torch.optim.lr_scheduler.StepLR(
            plain, step_size=1, gamma=0.5
        )  # created before the optimizer is wrapped
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        late = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        loss_of(model, batch(0, size).split(SHARE)[rank]).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = model.first.weight.grad.clone()
        with optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        close(hvd.broadcast(clipped, 0), clipped)
        early.step()
        late.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
        optimizer.zero_grad()

        loss_of(model, batch(1, size).split(SHARE)[rank]).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            optimizer.step()

        saved = copy.deepcopy(optimizer.state_dict())
        fresh = torch.optim.SGD(net().parameters(), lr=1.0, momentum=0.1)
        fresh.load_state_dict(saved)  # the format of the wrapped class
        optimizer.load_state_dict(saved)
        assert optimizer.state_dict()["param_groups"] == fresh.state_dict()["param_groups"]
        assert "momentum_buffer" in optimizer.state[model.first.weight]

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(2, size).split(SHARE)[rank])
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        for step in (3, 4):
            loss_of(model, batch(step, size).split(SHARE)[rank]).backward()
        optimizer.step()
        # a step after fewer passes than backward_passes_per_step reduces the accumulated gradients
        optimizer.zero_grad()
        loss_of(model, batch(5, size).split(SHARE)[rank]).backward()
        optimizer.step()
        for parameter in model.parameters():
            close(hvd.broadcast(parameter.detach(), 0), parameter.detach())


def test_common_usage_of_the_optimizer(ranks):
    ranks(2).run(common_usage)


def sparse_on_one_rank(rank, size):
    """In the first step, a rank without a gradient does not know that the gradients of other ranks are sparse."""
    with session():
        model = net(sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.embedding.parameters(), lr=0.1),
            [("embedding", model.embedding.weight)],
        )
        if rank == 0:
            model.embedding(torch.tensor([1])).sum().backward()
        words = "tensor embedding: rank 0 requested an allgather, but rank 1 requested an allreduce"
        with pytest.raises(hvd.HorovodInternalError, match=words):
            optimizer.step()


def test_a_sparse_gradient_that_other_ranks_lack_raises_an_error(ranks):
    ranks(2).run(sparse_on_one_rank)


def later_parameters(rank, size):
    """Parameters that are unfrozen or added later are reduced from the next step."""
    with session():
        for options in ({}, {"groups": 1}, {"names": False}, {"op": hvd.Adasum}):
            model, added = net(), nn.Linear(13, 13)
            hvd.broadcast_parameters(added.state_dict(), root_rank=0)
            names = model.named_parameters() if options.pop("names", True) else None
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=names, **options
            )
            for step in range(4):
                if step == 1:
                    model.frozen.requires_grad_(True)
                    optimizer.add_param_group({"params": added.parameters(), "lr": 0.2})
                optimizer.zero_grad()
                logits = added(model(batch(step, size).split(SHARE)[rank]))
                logits.square().mean().backward()
                own = model.frozen.weight.grad
                expected = (
                    None if own is None or options.get("op") else hvd.allreduce(own.clone(), name="own")
                )
                optimizer.step()
                if (
                    expected is not None and step == 1
                ):  # later gradients may be reduced during the backward pass
                    close(model.frozen.weight.grad, expected)
            for parameter in (*model.parameters(), *added.parameters()):
                close(hvd.broadcast(parameter.detach(), 0), parameter.detach())


def test_parameters_that_are_trainable_later_are_reduced(ranks):
    ranks(2).run(later_parameters)


def states(rank, size):
    with session():
        torch.manual_seed(rank)
        for make in (
            lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.9),
            lambda p: torch.optim.Adam(p, lr=0.1 * (rank + 1), betas=(0.5, 0.6 + 0.1 * rank), amsgrad=True),
            lambda p: torch.optim.LBFGS(p, lr=0.1 * (rank + 1)),
            lambda p: torch.optim.Adagrad(p),
            lambda p: torch.optim.SGD(p, lr=0.5),
        ):
            model = nn.Linear(3, 2)
            optimizer = make(model.parameters())
            if rank == size - 1:  # the optimizers of other ranks have no state

                def closure(model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = model(torch.ones(1, 3)).square().sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
                optimizer.state["shared"] = {"count": 3, "average": torch.ones(2)}
            hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
            assert optimizer.state["shared"]["count"] == 3
            everyone = hvd.allgather_object((optimizer.state_dict(), list(model.parameters())))
            for state, parameters in everyone:
                assert str(state) == str(everyone[0][0])
                assert all(torch.equal(a, b) for a, b in zip(parameters, everyone[0][1], strict=True))
            model(torch.ones(1, 3)).square().sum().backward()
            if not isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step()
        fresh = nn.Linear(3, 2)
        fresh.bias.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(fresh.parameters(), lr=0.5), fresh.named_parameters()
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        close(fresh.weight.grad, torch.zeros(2, 3))
        assert fresh.bias.grad is None
        with pytest.raises(ValueError, match="invalid params of type"):
            hvd.broadcast_parameters("model", 0)
        with pytest.raises(ValueError, match="lr is of type float"):
            hvd.broadcast_parameters({"lr": 0.1}, 0)
        hvd.broadcast_parameters(nn.Linear(2, 2).parameters(), 0)
        if rank == 0:
            assert hvd.broadcast_object({"a": [1, (2, None)]}, 0) == {"a": [1, (2, None)]}
        else:
            assert hvd.broadcast_object(None, 0) == {"a": [1, (2, None)]}
        assert hvd.allgather_object("x" * rank, name="texts") == ["x" * r for r in range(size)]


@pytest.mark.parametrize("size", [1, 3])
def test_parameters_states_and_objects_are_broadcast(ranks, size):
    ranks(size).run(states)
