"""The REST contract, which service and agent share. Each module holds the pydantic models of one
domain.
"""
