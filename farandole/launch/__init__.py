"""Start the ranks of a job, and determine the rank of a process in its job.

Every program calls `runtime.init`.  `local.launch` is the launcher behind `--ranks`.
"""
