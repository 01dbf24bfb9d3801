"""Freeze all objects in the fork server, so that garbage collection in forked processes does not copy their pages."""

import gc

gc.freeze()
gc.enable()
