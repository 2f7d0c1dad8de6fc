"""Task accuracy and language-modelling loss of a model: what tells one method from another."""
