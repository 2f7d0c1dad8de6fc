"""The changes of the schema, oldest first: each module names the one before it."""
