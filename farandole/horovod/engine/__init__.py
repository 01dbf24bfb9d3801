"""The queue of named requests: negotiation, fusion and execution.  `negotiation` holds the protocol and its proof."""
