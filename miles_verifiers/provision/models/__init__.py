"""Models: where they come from, and how each becomes a checked Hugging Face folder in the cache."""
