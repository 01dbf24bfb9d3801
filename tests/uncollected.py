"""Disable garbage collection in the fork server until all modules are imported (`tests.frozen`).

Importing creates no garbage, but collections would take about a tenth of the import time.
"""

import gc

gc.disable()
