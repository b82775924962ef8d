"""The version, apart from the package, which loads everything else."""

__version__ = "0.2.0"
