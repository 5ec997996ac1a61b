"""The agents that ship, by name.

Written out as text and imported when asked for, so that choosing one backend never imports the other. Each backend's
module defines the class `trainer` (built from a config and an environment; `iterate()`, `policy`, `arrays()`), and the
functions `load_policy(config, env, arrays)` and `evaluate_policy(policy, env, num_episodes, seed)`.
"""

from typing import NamedTuple


class Agent(NamedTuple):
    config: str  # module of the config class, of DEFAULTS by environment, and of METRICS
    config_class: str
    trainer: str  # class name in either backend's module
    torch: str
    jax: str


AGENTS = {
    "ppo": Agent(
        config="rlgraph.agents.ppo",
        config_class="PPOConfig",
        trainer="PPO",
        torch="rlgraph.agents.ppo_torch",
        jax="rlgraph.agents.ppo_jax",
    ),
}
