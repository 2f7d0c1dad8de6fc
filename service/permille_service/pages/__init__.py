"""The page below `/ui`, on which operators work and watch: usable without scripts."""
