"""The command line of the operator: a thin client of the REST API."""
