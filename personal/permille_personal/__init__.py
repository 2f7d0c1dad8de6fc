"""The command `permille personalise`: a personal model for one person, without a service."""
