"""Where does what the doctor says stand?"""

from __future__ import annotations

TUNING = "PyTorch, Performance Tuning Guide"
LINEAR = "NVIDIA, Linear/Fully-Connected Layers User's Guide"
CONVOLUTION = "NVIDIA, Convolutional Layers User's Guide"
RECURRENT = "NVIDIA, Recurrent Layers User's Guide"
MEMORY_LIMITED = "NVIDIA, Memory-Limited Layers User's Guide"
CONVNETS = "NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets"
INTENSITY = "Williams, Waterman and Patterson 2009, Roofline"
DDP = "PyTorch, DistributedDataParallel; Li et al. 2020"
GOYAL = "Goyal et al. 2017, Accurate, Large Minibatch SGD"
KRIZHEVSKY = "Krizhevsky 2014, One weird trick; Malladi et al. 2022, On the SDEs and Scaling Rules"
CUDA_MODES = "PyTorch, CUDA semantics and environment variables"
AMP = "PyTorch, Automatic Mixed Precision; NVIDIA, Train With Mixed Precision"
BATCH_NORM = "Ioffe and Szegedy 2015, Batch Normalization; PyTorch, Performance Tuning Guide"
OWN = "Paceline, docs/guide/doctor.md"
