"""Placing tasks on unlike devices: several policies on one interface (``lading.planner.placement.contest``)."""
