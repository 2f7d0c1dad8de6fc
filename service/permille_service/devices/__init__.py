"""Devices: invitations, enrolment, tokens, and revocation."""
