"""SAC: its configuration, and one text a backend."""
