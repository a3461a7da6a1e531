"""Projection of a run on a cluster from its configuration alone: memory, time, and layouts that fit."""
