"""Start the ranks of a job, and determine the rank of a process in its job.

A program calls `runtime.init` to join its job.  `local.launch` implements the option `--ranks` of farandole's commands.
"""
