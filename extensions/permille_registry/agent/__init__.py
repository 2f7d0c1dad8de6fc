"""The part of the agent: blobs from a registry that the user has chosen."""
