"""One personalisation: its options, plan, steps, decision and durable run."""
