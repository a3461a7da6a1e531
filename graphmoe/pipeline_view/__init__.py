"""Pictures of what the ranks of a pipeline do when: a page to look into."""
