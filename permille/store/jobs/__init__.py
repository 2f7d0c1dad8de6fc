"""Jobs in the database: submit, claim, retry and sweep. No job is lost, and no result is published
twice.
"""
