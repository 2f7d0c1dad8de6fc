"""Model families and the loading of base models."""
