"""Files of others (traces, memory snapshots), read in a process whose memory and time the operating system bounds.

`bounded` is what to call; `child` is the process. Nothing here imports torch.
"""
