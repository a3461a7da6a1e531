"""What a run would need and reach on a cluster: memory, time and what fits, from its configuration alone."""
