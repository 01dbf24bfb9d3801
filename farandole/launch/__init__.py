"""Starting ranks, and finding out inside a rank which one it is.

`runtime.init` is what every program calls; `local.launch` is the launcher behind `--ranks`.
"""
