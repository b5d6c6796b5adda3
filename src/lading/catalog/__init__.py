"""Machines and models as data, each number with its source, and what reads them."""
