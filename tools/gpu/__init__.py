"""What tools/gpu_check.py runs, each part in a process of its own."""
