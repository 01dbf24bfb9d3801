"""The benchmark of collectives and point-to-point messages, with all installed backends in one run.

run.py              measures all operations and backends
setup.py            the options
backends.py         chooses the backends
implementations.py  the calls of each backend
mpi.py              the calls of MPI
operations.py       the operations, and the amount of data that they transfer
messages.py         point-to-point messages
values.py           inputs and expected results
measure.py          times a call
overlap.py          times a call during a computation
table.py            prints the table
picture.py          plots latency and bandwidth against message size
"""
