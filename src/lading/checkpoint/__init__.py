"""Checkpoints: what they hold, how they are written so that a kill leaves them whole, who may write."""
