"""The REST API of permille."""
