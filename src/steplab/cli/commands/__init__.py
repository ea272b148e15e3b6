"""One file per command: its docstring is the help, its function has the command's name.

`list_` and `import_` avoid a builtin and a keyword.
"""
