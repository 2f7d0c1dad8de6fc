"""The command line `permille-agent`.

The modules that `main.py` imports load torch, numpy, pydantic and the network libraries only inside
functions, so that `--help` is fast. A test checks this.
"""
