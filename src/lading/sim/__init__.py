"""Says when everything in a step would begin and end."""
