"""Convert command lines of timm's and NVIDIA's trainers to recipes."""
