"""Freeze all objects of the fork server, so that garbage collection in forked processes copies none of their pages."""

import gc

gc.freeze()
