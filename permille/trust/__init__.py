"""Trust in releases: The Update Framework's roles, and the repository that signs them."""
