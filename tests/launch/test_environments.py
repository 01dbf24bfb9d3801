"""Read placements from the variables of each launcher, without running a launcher."""

from __future__ import annotations

import pytest

from farandole.launch.environments import find_placement, first_host, tasks_per_node
from farandole.launch.placement import Address, LaunchError, NoRendezvous, SameHost, TorchVariables

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-3458@1",
    "PMIX_RANK": "1",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
}


def numbers(environ):
    found = find_placement(environ)
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size


def test_no_launcher_is_a_world_of_one():
    assert numbers({"HOME": "/home/me"}) == ("alone", 0, 1, 0, 1)


def test_torchrun_variables():
    assert numbers(TORCHRUN) == ("torchrun", 3, 4, 1, 2)
    assert find_placement(TORCHRUN).rendezvous == TorchVariables()


def test_the_run_id_distinguishes_our_launcher_from_torchrun():
    assert (
        find_placement({**TORCHRUN, "TORCHELASTIC_RUN_ID": "farandole-0a1b"}).launcher == "farandole launch"
    )


def test_variables_set_by_hand():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert numbers(by_hand) == ("environment variables", 0, 2, None, None)


def test_hydra_on_one_host():
    assert numbers(HYDRA) == ("mpirun (Hydra)", 1, 2, 1, 2)
    assert isinstance(find_placement(HYDRA).rendezvous, SameHost)


def test_hydra_on_two_hosts_needs_an_address():
    two_hosts = {**HYDRA, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    rendezvous = find_placement(two_hosts).rendezvous
    assert isinstance(rendezvous, NoRendezvous)
    assert "MASTER_ADDR" in rendezvous.advice
    chosen = find_placement({**two_hosts, "MASTER_ADDR": "node0", "MASTER_PORT": "29501"})
    assert chosen.rendezvous == Address("node0", 29501)


def test_open_mpi_on_one_host():
    assert numbers(OPEN_MPI) == ("mpirun (Open MPI)", 1, 2, 1, 2)
    assert find_placement(OPEN_MPI).rendezvous == SameHost("prterun-host-3458@1")


def test_slurm_on_several_hosts():
    assert numbers(SLURM) == ("srun (Slurm)", 5, 6, 1, 2)
    rendezvous = find_placement(SLURM).rendezvous
    assert isinstance(rendezvous, Address)
    assert rendezvous.host == "gpu007"
    assert 10_000 <= rendezvous.port < 30_000


def test_slurm_steps_have_their_own_ports():
    ports = {find_placement({**SLURM, "SLURM_STEP_ID": str(s), "SLURM_JOB_ID": str(j)}).rendezvous.port
             for s in range(4) for j in range(4711, 4715)}  # fmt: skip
    assert len(ports) == 16


def test_slurm_on_one_host():
    one_host = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "gpu007", "SLURM_NODEID": "0"}
    one_host |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert find_placement(one_host).rendezvous == SameHost("slurm-4711.2")
    assert numbers(one_host) == ("srun (Slurm)", 1, 2, 1, 2)


def test_a_batch_script_of_slurm_is_not_a_rank():
    script = {k: v for k, v in SLURM.items() if "STEP" not in k} | {
        "SLURM_PROCID": "0",
        "ENVIRONMENT": "BATCH",
    }
    assert find_placement(script).launcher == "alone"


def test_an_allocation_of_slurm_without_srun_is_alone():
    assert find_placement({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}).launcher == "alone"


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (SLURM | TORCHRUN, "torchrun"),  # torchrun started by srun
        (SLURM | HYDRA, "mpirun (Hydra)"),  # mpirun whose helpers srun started
        (SLURM | OPEN_MPI, "mpirun (Open MPI)"),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "6"}, "srun (Slurm)"),  # srun --mpi=pmi2
        (SLURM | {"PMIX_RANK": "5"}, "srun (Slurm)"),  # srun --mpi=pmix
    ],
)
def test_the_innermost_launcher_is_used(environ, launcher):
    assert find_placement(environ).launcher == launcher


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "7"}, r"rank 7 of 4 \(RANK=7, WORLD_SIZE=4\).*from 0 to 3"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, r"local rank 2 of 2 .*from 0 to 1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, r"9 ranks on this host, but only 4 in the job"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, r"a job of 0 ranks"),
        ({**TORCHRUN, "RANK": "one"}, r"torchrun set RANK='one'; expected an integer"),
        ({"RANK": "1"}, r"WORLD_SIZE is not set \(RANK=1 is set\)"),
        ({"WORLD_SIZE": "2"}, r"RANK is not set \(WORLD_SIZE=2 is set\)"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, r"not set: MASTER_PORT"),
        ({**HYDRA, "MASTER_ADDR": "node0"}, r"MASTER_ADDR=node0 is set, but MASTER_PORT is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_RANK is not set"),
        ({"PMIX_RANK": "3"}, r"as rank 3, but no environment variable contains the number of ranks"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, r"without valid variables for its job"),
    ],
)
def test_contradictory_variables_are_refused(environ, message):
    with pytest.raises(LaunchError, match=message):
        find_placement(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("alpha", "alpha"), ("n[01-03,7],m1", "n01"), ("r[2-3]n[5,6]-ib", "r2n5-ib"), ("a,b[1-2]", "a")],
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("") == []
