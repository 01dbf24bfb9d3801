"""Collective algorithms over point-to-point messages; each runs on any `Transport`.

An algorithm is a generator.  It posts messages and yields each message that it must wait for.  Several algorithms can
therefore progress at the same time:

    steps = ring.all_reduce(transport, tensor, combine)
    finish(steps, timeout_s)

Costs follow the usual model: `latency_s` per message, `seconds_per_byte`, p ranks, S bytes.
"""
