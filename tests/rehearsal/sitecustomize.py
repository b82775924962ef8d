"""Install the rehearsed GPU in every process that has this folder on PYTHONPATH."""

import rehearsed_gpu

rehearsed_gpu.install()
