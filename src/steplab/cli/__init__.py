"""The command line: one small file per command, which parses options, calls lab and passes the result to report."""
