"""The mathematics of optimizers, on plain tensors."""
