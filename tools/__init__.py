"""Tools of those who work on Lading: what makes the tables of the catalog, and what checks Lading; not installed."""
