"""Jobs in the database: submitted, claimed, retried, swept. No job is lost, none is published twice."""
