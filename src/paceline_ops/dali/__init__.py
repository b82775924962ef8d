"""The DALI back-end: decode and resize images on the GPU."""
