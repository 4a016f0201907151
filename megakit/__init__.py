"""megakit: GPT pretraining on a grid of tensor, pipeline and data parallel ranks."""

__version__ = "0.1.0"
