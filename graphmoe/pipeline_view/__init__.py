"""Pictures of what the ranks of a pipeline do when: a PNG, and a page to look into."""
