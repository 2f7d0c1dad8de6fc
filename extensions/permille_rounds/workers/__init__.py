"""The workers' part: the job that closes a round, and the end of rounds at their deadline."""
