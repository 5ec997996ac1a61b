"""What the agents are made of: returns, running moments, replay, a count."""
