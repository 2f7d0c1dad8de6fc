"""The page below `/ui`, on which operators watch jobs and fleet: readable without scripts."""
