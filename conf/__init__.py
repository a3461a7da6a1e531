"""The YAML configuration of graphmoe, found by Hydra as ``pkg://conf``."""
