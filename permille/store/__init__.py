"""Tables, queries, blob stores and job leases, for the service and the workers. Devices never import
it.
"""
