"""What a run leaves: samples, dump, metrics, manifest, run directory. Nothing is imported here: samples need no pyarrow."""
