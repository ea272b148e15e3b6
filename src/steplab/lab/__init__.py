"""Use cases shared by the command line and Python. Nothing here imports torch: child processes measure."""
