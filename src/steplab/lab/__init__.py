"""The use cases that the command line and Python users share. Nothing here imports torch; measuring happens in
a child process."""
