"""ExecuTorch as an engine: a package exported as a program elsewhere, run here by the runtime alone."""
