"""What is kept and what goes: blobs that rows name, and results, reports and jobs that a rule lets go."""
