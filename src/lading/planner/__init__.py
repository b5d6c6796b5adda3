"""Chooses where every tensor is between two uses; ``planner.api`` is the entry."""
