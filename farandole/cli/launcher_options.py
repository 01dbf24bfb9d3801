"""The options of torchrun and horovodrun that `farandole launch` accepts, and alternatives to the other options.

The dictionaries map the name of each option to None if `farandole launch` accepts the option, and otherwise to a
suggested alternative.  Names are written with hyphens; `farandole launch` also accepts them with underscores.
"""

from __future__ import annotations

from collections.abc import Mapping

FIXED = "the number of ranks is fixed at the start of a job; for elastic jobs, use torchrun --nnodes MIN:MAX script.py"

_LOG = "use --output-filename DIR, which writes each rank's output to files"
_NETWORK = "omit it, because --rendezvous or --hosts selects the network between hosts"

TORCHRUN: Mapping[str, str | None] = {
    "--nnodes": None,
    "--nproc-per-node": None,
    "--node-rank": None,
    "--rdzv-backend": None,
    "--rdzv-endpoint": None,
    "--rdzv-id": "omit it, because the address of --rendezvous identifies the job",
    "--rdzv-conf": "use --start-timeout, the time in seconds that hosts wait for each other",
    "--standalone": None,
    "--master-addr": None,
    "--master-port": None,
    "--local-addr": _NETWORK,
    "--max-restarts": None,
    "--monitor-interval": "omit it, because the launcher checks the ranks 20 times per second",
    "--signals-to-handle": "omit it, because the launcher forwards SIGTERM, SIGINT, SIGHUP and SIGQUIT to the ranks",
    "--shutdown-timeout": "omit it, because the ranks have one minute to end after a signal; a second signal kills them",
    "--start-method": "omit it, because each rank is a new process",
    "--role": "omit it, because all ranks of a job have the same role",
    "--module": None,
    "-m": None,
    "--no-python": None,
    "--run-path": "omit it, because scripts run in the rank's process",
    "--log-dir": _LOG,
    "--redirects": _LOG,
    "-r": _LOG,
    "--tee": _LOG,
    "-t": _LOG,
    "--local-ranks-filter": _LOG,
    "--duplicate-stdout-filters": _LOG,
    "--duplicate-stderr-filters": _LOG,
    "--logs-specs": _LOG,
    "--event-log-handler": "omit it, because the launcher prints its messages to stderr",
    "--numa-binding": "use --pin (the default), which pins each rank to its own cores",
    "--virtual-local-rank": "omit it, and select the device with LOCAL_RANK or runtime.device",
    "--help": None,
}
"""All options of torchrun in torch 2.15; the values are None or an alternative."""

_TUNED = "set --fusion-threshold-mb and --cycle-time-ms manually"
_NOT_TUNED = "omit it, because the launcher does not tune parameters"
_HIERARCHICAL = "omit it, because ranks on one host communicate through shared memory"
_FLAT = "omit it, because ranks on one host always communicate through shared memory"
_LEVEL = "set the level in the program: logging.getLogger('farandole').setLevel(level)"
_FORMAT = "set the format in the program: logging.basicConfig(format=...)"
_DEFAULT = "omit it, because this is the default"
_MPI = "start the ranks with MPI's own launcher: mpirun ARGS -n 4 python script.py"

HOROVODRUN: Mapping[str, str | None] = {
    "-np": None,
    "--num-proc": None,
    "--hosts": None,
    "-H": None,
    "--hostfile": None,
    "-hostfile": None,
    "--ssh-port": None,
    "-p": None,
    "--ssh-identity-file": None,
    "-i": None,
    "--network-interfaces": None,
    "--network-interface": None,
    "--start-timeout": None,
    "--output-filename": None,
    "--verbose": None,
    "--help": None,
    "--version": "run `farandole --version`",
    "-v": "run `farandole --version`",
    "--check-build": "run `farandole info` to list the available features",
    "-cb": "run `farandole info` to list the available features",
    "--disable-cache": "omit it, because the launcher connects to all hosts at every start",
    "--config-file": "pass the options on the command line",
    "--fusion-threshold-mb": None,
    "--cycle-time-ms": None,
    "--cache-capacity": None,
    "--hierarchical-allreduce": _HIERARCHICAL,
    "--no-hierarchical-allreduce": _FLAT,
    "--hierarchical-allgather": _HIERARCHICAL,
    "--no-hierarchical-allgather": _FLAT,
    "--autotune": _TUNED,
    "--no-autotune": _DEFAULT,
    "--autotune-log-file": _NOT_TUNED,
    "--autotune-warmup-samples": _NOT_TUNED,
    "--autotune-steps-per-sample": _NOT_TUNED,
    "--autotune-bayes-opt-max-samples": _NOT_TUNED,
    "--autotune-gaussian-process-noise": _NOT_TUNED,
    "--min-np": FIXED,
    "--min-num-proc": FIXED,
    "--max-np": FIXED,
    "--max-num-proc": FIXED,
    "--slots-per-host": FIXED,
    "--elastic-timeout": "set the variable HOROVOD_ELASTIC_TIMEOUT, and start the ranks with mpirun "
    "-disable-auto-cleanup, because `farandole launch` stops a job when a rank fails",
    "--reset-limit": "use --max-restarts to limit the number of restarts",
    "--blacklist-cooldown-range": FIXED,
    "--host-discovery-script": f"{FIXED}; to name the hosts, use --hosts or --hostfile",
    "--timeline-filename": None,
    "--timeline-mark-cycles": None,
    "--no-timeline-mark-cycles": _DEFAULT,
    "--no-stall-check": None,
    "--stall-check": _DEFAULT,
    "--stall-check-warning-time-seconds": None,
    "--stall-check-shutdown-time-seconds": None,
    "--gloo": "omit it, because ranks on one host use shared memory, and ranks on several hosts use TCP",
    "--gloo-timeout-seconds": "set the timeout in the program: farandole.init(timeout_s=...)",
    "--mpi": "start the ranks with MPI's own launcher: mpirun -n 4 python script.py",
    "--mpi-args": _MPI,
    "--mpi-threads-disable": "omit it, because the launcher does not use MPI",
    "--no-mpi-threads-disable": "omit it, because the launcher does not use MPI",
    "--tcp": "omit it, because ranks on several hosts always use TCP",
    "--binding-args": "use --pin (the default), which pins each rank to its own cores",
    "--thread-affinity": "use --pin (the default), which pins each rank to its own cores",
    "--num-nccl-streams": "omit it, because NCCL uses one stream per process group",
    "--jsrun": "start the ranks with LSF's own launcher: jsrun -n 4 python script.py",
    "--log-level": _LEVEL,
    "--log-with-timestamp": _FORMAT,
    "--log-without-timestamp": _FORMAT,
    "--log-hide-timestamp": _FORMAT,
    "--no-log-hide-timestamp": _FORMAT,
    "--prefix-output-with-timestamp": _LOG,
    "-prefix-timestamp": _LOG,
}
"""All options of horovodrun in Horovod 0.28; the values are None or an alternative."""

ALTERNATIVES = {name: text for name, text in {**TORCHRUN, **HOROVODRUN}.items() if text is not None}
"""The rejected options of torchrun and horovodrun, mapped to the suggested alternatives."""
