"""The REST contract, shared by service and agent: one module a domain, pydantic models only."""
