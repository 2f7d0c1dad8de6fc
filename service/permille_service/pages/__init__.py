"""The page below `/ui`, where operators work and watch. It also works without scripts."""
