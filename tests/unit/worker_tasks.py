import os
import time


def behave(task: str) -> str:
    if task == "raise":
        raise ValueError("no such tile\nand more")
    if task == "die":
        os._exit(3)
    if task == "hang":
        time.sleep(600)
    return f"{task} by {os.getpid()}"
