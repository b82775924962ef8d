"""Detection and segmentation: find objects in pictures, and the class of each pixel."""
