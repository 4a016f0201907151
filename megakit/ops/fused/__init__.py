"""The kernels of csrc/ as torch operators `megakit::NAME`, with shapes for fake tensors and gradients.

They take what the kernels take, and refuse the rest; choosing, and the torch reference, is the work of the modules above.
"""
