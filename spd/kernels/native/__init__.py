"""Kernels in C for processors that multiply bfloat16: sources, their build, and the library they
become."""
