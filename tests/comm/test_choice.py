"""Tables of measurements: reading, predictions for unmeasured sizes and hosts, and invalid tables."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.distributed as dist

from farandole.comm import Options
from farandole.comm.algorithms.choice import ALL_REDUCE, Choice
from farandole.comm.algorithms.table import COSTS, Fit, Link, Table, TableError, fit
from tests.comm.hosts import hierarchical_group

TRUE = Fit(latency_s=20e-6, seconds_per_byte=1e-9)
SIZES = [64 << 2 * power for power in range(10)]


def seconds(name: str, hosts: int, size: int) -> float:
    return COSTS[name](hosts, size, TRUE.latency_s, TRUE.seconds_per_byte)


def made_up(hosts: range | list[int], name: str = "made up", scale: float = 1.0) -> Link:
    """Return measurements that follow the models exactly."""
    times = {n: {s: {a: scale * seconds(a, n, s) for a in COSTS} for s in SIZES} for n in hosts}
    return Link(name, times)


def test_a_fit_recovers_the_parameters_of_exact_points():
    found = made_up([2, 3, 4]).fit
    assert found.latency_s == pytest.approx(TRUE.latency_s)
    assert found.seconds_per_byte == pytest.approx(TRUE.seconds_per_byte)


def test_a_fit_equals_least_squares_of_numpy():
    numpy = pytest.importorskip("numpy")
    chance = random.Random(1)
    points = [
        (cost, n, s, seconds(name, n, s) * chance.uniform(0.8, 1.25))
        for name, cost in COSTS.items()
        for n in (2, 3, 5)
        for s in SIZES
    ]
    rows = [[cost(n, s, 1.0, 0.0) / t, cost(n, s, 0.0, 1.0) / t] for cost, n, s, t in points]
    wanted = numpy.linalg.lstsq(numpy.array(rows), numpy.ones(len(rows)), rcond=None)[0]
    found = fit(points)
    assert [found.latency_s, found.seconds_per_byte] == pytest.approx(list(wanted), rel=1e-6)


@pytest.mark.parametrize("points", [[(2, 64, 1e-3)], [(2, 64, 1e-3), (2, 1 << 20, 1e-6)], [(2, 0, 1e-5)]])
def test_a_fit_is_never_negative(points):
    found = fit([(COSTS["ring"], *point) for point in points])
    assert found.latency_s >= 0 and found.seconds_per_byte >= 0


def test_times_between_measured_sizes_are_interpolated_linearly():
    link = made_up([2])
    assert link.predict("ring", 2, 64) == link.seconds[2][64]["ring"]
    middle = link.predict("ring", 2, (64 + 256) // 2)
    assert middle == pytest.approx((link.seconds[2][64]["ring"] + link.seconds[2][256]["ring"]) / 2)
    assert link.predict("ring", 2, 1) == link.seconds[2][64]["ring"]


@pytest.mark.parametrize("hosts", [2, 5, 8, 13])
@pytest.mark.parametrize("size", [1, 4096, 1 << 22, 1 << 30])
def test_unmeasured_hosts_are_predicted_by_the_models(hosts, size):
    link = made_up([2, 3, 4])
    if hosts == 2 and size < SIZES[0]:
        return
    for name in COSTS:
        assert link.predict(name, hosts, size) == pytest.approx(seconds(name, hosts, size))
    best = min(COSTS, key=lambda name: seconds(name, hosts, size))
    assert Table((link,)).best(hosts, size) == best


def test_the_best_algorithm_has_the_smallest_worst_case_slowdown():
    """The first link favors "ring", which takes ten times as long as "doubling" on the second link."""
    first = Link("first", {2: {64: {"ring": 1.0, "doubling": 1.2, "rabenseifner": 3.0}}})
    second = Link("second", {2: {64: {"ring": 10.0, "doubling": 1.0, "rabenseifner": 3.0}}})
    assert Table((first,)).best(2, 64) == "ring"
    assert Table((first, second)).best(2, 64) == "doubling"


def test_a_table_survives_a_round_trip(tmp_path):
    table = Table((made_up([2, 3]), made_up([2], "other", 2.0)))
    path = tmp_path / "tuned.json"
    path.write_text(table.dump())
    assert Table.read(str(path)) == table


def test_the_default_table_states_its_origin_and_covers_every_size():
    table = Table.default()
    for link in table.links:
        assert link.name and {"processor", "date", "messages", "hosts"} <= set(link.measured)
    choice = Choice()
    for hosts in (2, 4, 8, 16, 32):
        assert choice.all_reduce(hosts, 8) == "doubling"
        assert hosts < 8 or choice.all_reduce(hosts, 1 << 28) != "doubling"
    for hosts in range(2, 40):
        for power in range(31):
            assert choice.all_reduce(hosts, 1 << power) in ALL_REDUCE


def test_a_choice_is_constant_between_powers_of_two():
    choice = Choice("auto", Table((made_up([2, 3, 4, 8]),)))
    for power in range(3, 25):
        low, high = 1 << power, (2 << power) - 1
        assert choice.all_reduce(8, low) is choice.all_reduce(8, high)
    assert Choice("ring").all_reduce(4, 8) == "ring"
    assert choice.all_reduce(1, 0) in ALL_REDUCE and choice.all_reduce(3, 0) in ALL_REDUCE


def _changed(**change: object) -> str:
    return json.dumps({**json.loads(Table((made_up([2]),)).dump()), **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a table written by farandole tune"),
        ("[]", "expected a table written by farandole tune"),
        ("{}", "written by farandole tune .KeyError: 'version'"),
        (_changed(version=2), "expected table version 1, got version 2"),
        (_changed(links=[]), "expected measurements of a link, got none"),
        (
            _changed(links=[{"name": "x", "seconds": {"2": {"64": {"ring": 1.0}}}}]),
            "expected measurements for",
        ),
        (
            _changed(links=[{"name": "x", "seconds": {"2": {"64": {"ring": 0}}}}]),
            "positive number of seconds, got 0",
        ),
        (
            _changed(links=[{"name": "x", "seconds": {"2": {"64": {"ring": "1"}}}}]),
            "positive number of seconds, got '1'",
        ),
        (_changed(links=[{"name": "x", "seconds": {"1": {"64": {"ring": 1.0}}}}]), "2 or more hosts"),
        (_changed(links=[{"name": "x", "seconds": {"two": {}}}]), "written by farandole tune"),
    ],
)
def test_invalid_tables_are_refused(tmp_path, text, message):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(TableError, match=message) as refused:
        Options(table=str(path))
    assert str(path) in str(refused.value)


def test_a_missing_file_is_refused():
    with pytest.raises(ValueError, match="cannot read table='/no/such.json': No such file"):
        Options(table="/no/such.json")


def test_a_table_together_with_an_algorithm_is_refused():
    with pytest.raises(ValueError, match="has no effect with algorithm='ring'"):
        Options(table="tuned.json", algorithm="ring")


def _by_table(rank: int, size: int, paths: list[str]) -> None:
    group = hierarchical_group(list(range(size)), rank, table=paths[rank])
    tensor = torch.arange(1000.0) * (rank + 1)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.arange(1000.0) * sum(range(1, size + 1)))
    dist.destroy_process_group(group)


def test_a_group_chooses_algorithms_by_its_table(ranks, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(Table((made_up([2, 3]),)).dump())
    ranks(3).run(_by_table, [str(path)] * 3)


def _by_different_tables(rank: int, size: int, paths: list[str]) -> None:
    with pytest.raises(
        ValueError, match="different algorithms or tables of measurements; .* the same Options"
    ):
        hierarchical_group(list(range(size)), rank, table=paths[rank])


def test_ranks_with_different_tables_are_refused(ranks, tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for hosts, path in enumerate(paths, 2):
        path.write_text(Table((made_up([hosts]),)).dump())
    ranks(2).run(_by_different_tables, [str(path) for path in paths])
