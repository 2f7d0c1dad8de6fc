"""The agent's part of rollouts."""
