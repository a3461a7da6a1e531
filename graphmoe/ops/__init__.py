"""One file for each operation: reference, kernels, vendor adapters and the choice among them."""
