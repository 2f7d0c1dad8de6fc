"""Setting weights of a model to zero: which ones, by how much the rest makes up for them, layer by layer."""
