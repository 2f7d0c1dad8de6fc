"""The workers' part of rollouts: they advance rollouts and send webhooks."""
