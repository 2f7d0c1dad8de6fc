"""The service's part: operators define federations, and devices join them to train a shared state."""
