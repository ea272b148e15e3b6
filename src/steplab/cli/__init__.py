"""The command line: one small file a command, each of which parses, calls lab, and hands the result to report."""
