"""Text from files and streams, and fixed-length token sequences made from it."""
