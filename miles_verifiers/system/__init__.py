"""The machine: processes, files, environment variables, temporary folders, memory, progress and console output."""
