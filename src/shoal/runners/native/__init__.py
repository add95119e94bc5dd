"""Small C++ kernels for CPUs: few rows, paged KV, shared trunks, the same bits in any batch."""
