"""What the interfaces for all frameworks share: the state of this process, process sets, exceptions."""
