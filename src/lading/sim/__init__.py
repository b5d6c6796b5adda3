"""Simulation: when each action of a step begins and ends, and how many bytes each rank holds meanwhile."""
