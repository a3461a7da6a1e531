"""The report page of a run: what its folder has, as charts and tables."""
