"""Database rows of groups, rollouts and webhooks. The core has their tables."""
