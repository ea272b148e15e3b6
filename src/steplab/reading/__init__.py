"""Read trace and snapshot files in a process with bounded memory and time. Call `bounded`; `child` is the process.
Nothing here imports torch.
"""
