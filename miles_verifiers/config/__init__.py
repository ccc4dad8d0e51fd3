"""What a run is told: the settings by section, and how they are loaded and merged."""
