"""The REST contract, shared by service and agent."""
