"""Imported last where processes are forked: no collection of theirs looks at what is loaded, nor copies its pages."""

import gc

gc.freeze()
