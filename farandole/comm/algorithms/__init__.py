"""Collective algorithms over point-to-point messages, for any `Transport`.

An algorithm is a generator that posts messages and yields each message that it must wait for.  Several algorithms can
therefore make progress at the same time:

    steps = ring.all_reduce(transport, tensor, combine)
    finish(steps, timeout_s)

The functions `*_cost` use the usual model: each message takes `latency_s`, plus `seconds_per_byte` for each byte.
"""
