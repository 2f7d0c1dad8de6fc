"""The command `permille personalise` for one person, composed of the existing programs."""
