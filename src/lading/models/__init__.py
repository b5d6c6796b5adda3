"""Reference models, models of Hugging Face, and their losses."""
