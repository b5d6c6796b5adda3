"""Tables, progress, the report, traces and memory snapshots: all that people read."""
