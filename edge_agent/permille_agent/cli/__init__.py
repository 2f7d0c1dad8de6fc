"""The command line `permille-agent`."""
