"""Page of a run: the contents of its folder as charts and tables."""
