"""The trust metadata of releases: a TUF repository per tenant."""
