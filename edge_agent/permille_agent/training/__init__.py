"""Training of a personal model: options, plan, steps, decision and durable run."""
