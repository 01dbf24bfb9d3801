"""Groups that span several hosts, with shared memory within a host and messages between hosts."""
