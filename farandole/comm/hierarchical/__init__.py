"""Groups on several hosts: shared memory inside a host, messages between hosts."""
