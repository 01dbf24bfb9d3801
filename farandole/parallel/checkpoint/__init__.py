"""The state of an engine on a disk."""
