"""`python -m steplab` is `steplab`."""

from steplab.cli.app import console

if __name__ == "__main__":
    console()
