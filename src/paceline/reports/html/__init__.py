"""The report page: one module for each group of sections."""
