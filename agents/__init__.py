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
        config="rlgraph.agents.dqn.config",
        config_class="DQNConfig",
        trainer="DQN",
        torch="rlgraph.agents.dqn.torch",
        jax="rlgraph.agents.dqn.jax",
    ),
    "ppo": Agent(
        config="rlgraph.agents.ppo.config",
        config_class="PPOConfig",
        trainer="PPO",
        torch="rlgraph.agents.ppo.torch",
        jax="rlgraph.agents.ppo.jax",
    ),
    "pqn": Agent(
        config="rlgraph.agents.pqn.config",
        config_class="PQNConfig",
        trainer="PQN",
        torch="rlgraph.agents.pqn.torch",
        jax="rlgraph.agents.pqn.jax",
    ),
    "sac": Agent(
        config="rlgraph.agents.sac.config",
        config_class="SACConfig",
        trainer="SAC",
        torch="rlgraph.agents.sac.torch",
        jax="rlgraph.agents.sac.jax",
    ),
}
