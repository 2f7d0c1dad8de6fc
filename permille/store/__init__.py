"""Tables, queries, blob stores and job leases. Never on a device."""
