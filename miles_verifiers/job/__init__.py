"""The job: its phases, and the commands that they run."""
