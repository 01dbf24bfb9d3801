"""Collective algorithms over messages: each works on any `Transport`.

An algorithm is a generator.  It posts messages, and yields those that it must wait for; so several can be under
way at once, each going on when its message is there:

    steps = ring.all_reduce(transport, tensor, combine)
    finish(steps, timeout_s)

Costs are in the usual model: `latency_s` per message, `seconds_per_byte`, p ranks, S bytes.
"""
