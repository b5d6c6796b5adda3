"""For tests and benchmarks: a captured step played by torch, random batches."""
