"""Jobs run: claimed from the database or by a broker's message, supervised in child processes, swept."""
