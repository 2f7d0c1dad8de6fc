"""One command for one person: `permille personalise`, composed of the programs that exist."""
