"""Jobs that train a run: for Slurm, torchrun and Kubernetes."""
