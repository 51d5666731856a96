"""One file a paper: functions that return a configuration."""
