"""Collective algorithms over point-to-point messages, for any `Transport`.

An algorithm is a generator that posts messages and yields each message for which it must wait.  The caller waits for
the message and then resumes the generator, so several algorithms can make progress at the same time.  The function
`finish` runs one algorithm to completion:

    steps = ring.all_reduce(transport, tensor, combine)
    finish(steps, timeout_s)

The functions `*_cost` predict times with the alpha-beta model: each message takes `latency_s` seconds, plus
`seconds_per_byte` seconds for each byte.
"""
