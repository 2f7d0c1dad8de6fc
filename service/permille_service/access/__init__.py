"""Access: tenants, operator tokens, and who may do what."""
