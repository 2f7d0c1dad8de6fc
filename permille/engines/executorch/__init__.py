"""The ExecuTorch engine: it runs a program that was exported elsewhere, with ExecuTorch's runtime alone."""
