"""Build-time front end: Metal source to native code (see build_kernels.py)."""
