"""Cost models: seconds of operations on a device, of transfers and of collectives."""
