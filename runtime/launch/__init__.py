"""Processes of a run: torch elastic, nodes of a Slurm job, error reports (docs/launch.md)."""
