"""The agents that ship, by name: where each one's configuration and its two implementations are.

Written out as text, so that choosing one backend never imports the other.
"""

AGENTS = {
    "ppo": {
        "config": "rlgraph.agents.ppo:PPOConfig",
        "defaults": "rlgraph.agents.ppo:DEFAULTS",
        "torch": "rlgraph.agents.ppo_torch:PPO",
        "jax": "rlgraph.agents.ppo_jax:PPO",
    },
}
