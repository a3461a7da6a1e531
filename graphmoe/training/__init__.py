"""Training loop and its step; metrics, saves, memory and a dry run."""
