"""The commands: a file each, whose docstring is its help and whose function has its name.

`list_` and `import_` are `steplab list` and `steplab import`: those words are Python's.
"""
