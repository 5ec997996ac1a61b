"""PPO: its configuration, and one text a backend."""
