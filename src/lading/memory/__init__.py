"""Bytes: who is alive when, where everything lies, and the proof that a Program holds together."""
