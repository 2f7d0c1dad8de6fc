"""Running of jobs: workers claim jobs, supervise them in child processes, and sweep up after lost workers."""
