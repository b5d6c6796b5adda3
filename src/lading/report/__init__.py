"""What people read: tables, progress, the report, traces, memory snapshots."""
