"""Back-ends that turn slices of samples into batches: loader processes, and images in memory."""
