"""The runner for Apple silicon's framework (and its CPU and CUDA builds): batch rows, and blocks of KV beside them."""
