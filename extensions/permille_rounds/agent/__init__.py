"""The agent's part: membership by the user's choice, history, training and contributions."""
