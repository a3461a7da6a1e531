"""HIP and CUDA graphs: captured spans of a step and their replays."""
