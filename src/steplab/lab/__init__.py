"""The use cases that the command line and the Python interface share. Nothing here imports torch, because measuring
happens in a child process."""
