"""Models whose tables the catalog has, built small to be captured."""
