"""Base models: registered, inspected, listed."""
