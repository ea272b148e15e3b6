"""One file per command: its docstring is the help, its function has the command's name.

Python reserves `list` and `import`, hence `list_` and `import_`.
"""
