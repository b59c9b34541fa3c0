"""Pages about runs, as HTML that needs nothing else."""
