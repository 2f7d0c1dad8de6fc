"""The command line `permille-agent`.

Modules of this package import torch, numpy, pydantic and the network libraries inside functions only. So
`--help` and shell completion start fast. A test of the start checks this.
"""
