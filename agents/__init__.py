"""The agents that ship, by name.

Written out as text and imported when asked for, so that choosing one backend never imports the other. Each backend's
module defines the class `trainer`, a Trainer of rlgraph.agents.trainer_torch or trainer_jax.
"""

from typing import NamedTuple


class Agent(NamedTuple):
    config: str  # module of the config class, of DEFAULTS by environment, and of METRICS
    config_class: str
    trainer: str  # class name in either backend's module
    torch: str
    jax: str


AGENTS = {
    "dqn": Agent(
        config="rlgraph.agents.dqn",
        config_class="DQNConfig",
        trainer="DQN",
        torch="rlgraph.agents.dqn_torch",
        jax="rlgraph.agents.dqn_jax",
    ),
    "ppo": Agent(
        config="rlgraph.agents.ppo",
        config_class="PPOConfig",
        trainer="PPO",
        torch="rlgraph.agents.ppo_torch",
        jax="rlgraph.agents.ppo_jax",
    ),
    "pqn": Agent(
        config="rlgraph.agents.pqn",
        config_class="PQNConfig",
        trainer="PQN",
        torch="rlgraph.agents.pqn_torch",
        jax="rlgraph.agents.pqn_jax",
    ),
    "sac": Agent(
        config="rlgraph.agents.sac",
        config_class="SACConfig",
        trainer="SAC",
        torch="rlgraph.agents.sac_torch",
        jax="rlgraph.agents.sac_jax",
    ),
}
