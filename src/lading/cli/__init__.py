"""The command line: one function a command, with the heavy imports inside."""
