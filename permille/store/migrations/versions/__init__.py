"""Changes of the schema, oldest first. Each module names the one before it."""
