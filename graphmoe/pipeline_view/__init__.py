"""Page with timelines of a pipeline's ranks."""
