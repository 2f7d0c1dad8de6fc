"""The fixtures of the agent's tests."""

from tests.unit.edge_agent.conftest import api, enrolment, home, package, service

__all__ = ["api", "enrolment", "home", "package", "service"]
