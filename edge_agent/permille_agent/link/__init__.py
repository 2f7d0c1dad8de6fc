"""The device's side of the service: connection, enrolment, downloads, reports."""
