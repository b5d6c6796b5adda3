"""Validation: published runs as requests, and how far predictions are from what was measured."""
