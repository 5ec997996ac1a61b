"""What a user would otherwise pick: Gymnasium's own vector environment, gymnax and rejax, on the same work."""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from rlgraph.agents.ppo.torch import PPO
from rlgraph.bench.torch_variants import timer
from rlgraph.bench.variants import COMPARED_STEPS, Prepared, Skipped, Workload, means, training_outcome, variant
from rlgraph.precision import torch_matmul_precision
from rlgraph.rollout import EpisodeTotals, Rollout
from rlgraph.rollout.torch import in_parts

MOST_PYTHON_ENVIRONMENTS = 4096  # Gymnasium's environments without a vector version run one after the other


@variant("gymnasium", "gymnasium", reference="torch-eager", same_draws=False)
def _gymnasium(work: Workload) -> Prepared:
    """gymnasium.make_vec on the CPU; actor, critic and update in torch on the device, with the copies this takes."""
    if work.column == "train":
        return _gymnasium_training(work)
    policy = PPO.build_policy(work.config("torch", "eager"), work.environment())
    device = policy.obs_mean.device
    act = _random_actions(work) if work.column == "env" else _policy_actions(work, policy, device)
    loop, seen = _GymnasiumLoop(work, act), {}

    def run(num_steps=work.num_steps):
        with torch_matmul_precision(work.precision):
            seen["rows"] = loop.steps(num_steps)
            if work.column == "policy":
                value([row.obs for row in seen["rows"]])
                value([row.final_obs for row in seen["rows"]])

    @torch.no_grad()
    def value(obs):
        return in_parts(policy.value, torch.as_tensor(np.stack(obs), device=device))

    def outcome() -> dict:
        rows = seen["rows"]
        obs, reward, done, counted = map(np.stack, zip(*((r.obs, r.reward, r.done, ~r.resets) for r in rows)))
        return {"obs": obs[:COMPARED_STEPS], "means": means(obs, reward, done, counted)}

    def step_seconds(num_steps):
        return timer(lambda: run(num_steps), torch.device("cpu"))()

    # The host takes part in every step, so the clock is the measure, also on a GPU.
    return Prepared(timer(run, torch.device("cpu")), outcome, launches=lambda: 0, step_seconds=step_seconds)


class _GymnasiumStep(NamedTuple):
    """One step of B environments: arrays, but for what the policy computed on its device."""

    obs: np.ndarray
    action: Any
    log_prob: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    resets: np.ndarray  # bool, this step only reset the environment: Gymnasium does so in the step after an end
    final_obs: np.ndarray

    @property
    def done(self):
        return self.terminated | self.truncated


class _GymnasiumLoop:
    """Gymnasium's own vector environment, stepped with `act`: obs [B, ...] -> (action, log-prob)."""

    def __init__(self, work: Workload, act):
        if work.env not in gymnasium.registry:
            raise Skipped(f"Gymnasium has no {work.env}")
        vectorised = gymnasium.spec(work.env).vector_entry_point is not None
        if not vectorised and work.num_envs > MOST_PYTHON_ENVIRONMENTS:
            raise Skipped(f"{work.num_envs} environments one after the other in Python would take minutes a repeat")
        how = "vector_entry_point" if vectorised else "sync"
        self.envs, self.act = gymnasium.make_vec(work.env, work.num_envs, vectorization_mode=how), act
        self.obs, self.ended = self.envs.reset(seed=work.seed)[0], np.zeros(work.num_envs, bool)

    def steps(self, num_steps: int) -> list[_GymnasiumStep]:
        space, rows = self.envs.single_action_space, []
        for _ in range(num_steps):
            action, log_prob = self.act(self.obs)
            to_env = action.numpy(force=True) if isinstance(action, torch.Tensor) else action
            if isinstance(space, gymnasium.spaces.Box):
                to_env = np.clip(to_env, space.low, space.high).astype(np.float32)
            obs, reward, terminated, truncated, _ = self.envs.step(to_env)
            rows.append(_GymnasiumStep(self.obs, action, log_prob, reward, terminated, truncated, self.ended, obs))
            self.obs, self.ended = obs, terminated | truncated
        return rows


def _random_actions(work: Workload):
    space, rng = work.environment().action_space, np.random.default_rng(work.seed)
    shape = (work.num_envs, *space.shape)
    if isinstance(space, gymnasium.spaces.Discrete):
        return lambda obs: (rng.integers(space.n, size=shape), None)
    return lambda obs: (rng.normal(0, space.high, shape), None)


def _policy_actions(work: Workload, policy, device: torch.device):
    space, generator = work.environment().action_space, torch.Generator(device).manual_seed(work.seed)
    draw = torch.rand if isinstance(space, gymnasium.spaces.Discrete) else torch.randn

    @torch.no_grad()
    def act(obs):
        noise = draw((work.num_envs, *space.shape), generator=generator, device=device)
        return policy.act(torch.as_tensor(obs, dtype=torch.float32, device=device), noise)

    return act


class _GymnasiumCollector:
    """Takes the place of PPO's own collector: the same buffers, filled by Gymnasium's environments."""

    def __init__(self, work: Workload, agent: PPO):
        self.rollout, self.value, self.num_steps = agent.collector.rollout, agent.policy.value, work.num_steps
        self.loop = _GymnasiumLoop(work, _policy_actions(work, agent.policy, agent.device))
        self.return_B, self.length_B = np.zeros(work.num_envs), np.zeros(work.num_envs)
        self.steps_taken = 0

    @torch.no_grad()
    def collect(self) -> tuple[Rollout, EpisodeTotals]:
        rows, r = self.loop.steps(self.num_steps), self.rollout
        columns = _GymnasiumStep(*zip(*rows))
        for buffer, values in (
            (r.obs, columns.obs),
            (r.reward_TB, columns.reward),
            (r.terminated_TB, [row.terminated | row.resets for row in rows]),
            (r.truncated_TB, columns.truncated),
            (r.final_obs, columns.final_obs),
        ):
            buffer.copy_(torch.as_tensor(np.stack(values)))
        r.action.copy_(torch.stack(columns.action))
        r.log_prob_TB.copy_(torch.stack(columns.log_prob))
        r.value_TB.copy_(self.value(r.obs))
        r.final_value_TB.copy_(self.value(r.final_obs))
        # A step that only resets should teach nothing: as an end that is worth just V(s), its advantage is 0 (until
        # advantages are normalised: so these steps do sway the policy a little, which costs no time).
        resets = torch.as_tensor(np.stack(columns.resets), device=r.reward_TB.device)
        r.reward_TB.copy_(torch.where(resets, r.value_TB, r.reward_TB))
        self.steps_taken = int((~resets).sum())
        return r, EpisodeTotals(*(torch.tensor(total, device=resets.device) for total in self._totals(rows)))

    def _totals(self, rows: list[_GymnasiumStep]) -> tuple[float, float, float]:
        return_sum = length_sum = count = 0.0
        for row in rows:
            self.return_B += row.reward
            self.length_B += ~row.resets
            return_sum += (self.return_B * row.done).sum()
            length_sum += (self.length_B * row.done).sum()
            count += row.done.sum()
            self.return_B *= ~row.done
            self.length_B *= ~row.done
        return return_sum, length_sum, count


def _only_ppo(work: Workload) -> None:
    if work.agent != "ppo":
        raise Skipped(f"trains by PPO only, not by {work.agent}")


def _gymnasium_training(work: Workload) -> Prepared:
    """PPO in torch, operation by operation, as a loop around Gymnasium's environments runs it."""
    _only_ppo(work)
    agent = PPO(work.config("torch", "eager"), work.environment())
    agent.collector = _GymnasiumCollector(work, agent)
    last = []

    def run():
        last[:] = [agent.iterate()]

    return Prepared(
        timer(run, agent.device),
        lambda: training_outcome(last[0].get()[-1], agent.collector.steps_taken),
        launches=lambda: 0,
    )


@variant(
    "gymnax",
    "gymnax",
    reference="jax-eager",
    same_draws=False,
    columns=("env", "policy"),
    requires=("gymnax",),
)
def _gymnax(work: Workload) -> Prepared:
    """gymnax's environment in a scan of T steps, with our policy."""
    import gymnax
    import jax
    import jax.numpy as jnp

    from rlgraph.agents.ppo import jax as ppo_jax
    from rlgraph.bench.jax_variants import random_policy, repeated
    from rlgraph.devices import jax_device
    from rlgraph.rollout.jax import in_parts

    try:
        env, params = gymnax.make(work.env)
    except ValueError as error:
        raise Skipped(f"gymnax has no {work.env}") from error
    ours, device = work.environment(), jax_device(work.device)
    box = isinstance(ours.action_space, gymnasium.spaces.Box)
    with jax.default_device(device):
        policy_key, reset_key, key = jax.random.split(jax.random.key(work.seed), 3)
        policy = ppo_jax.PPO.build_policy(work.config("jax", "graph"), ours, policy_key)
        act, value = (policy.act, policy.value) if work.column == "policy" else random_policy(ours)
        keys = jax.random.split(reset_key, work.num_envs)
        obs, state = jax.vmap(env.reset, in_axes=(0, None))(keys, params)

    def one_step(carry, _):
        obs, state, key = carry
        key, noise_key, step_key = jax.random.split(key, 3)
        shape = (work.num_envs, *ours.action_space.shape)
        noise = jax.random.normal(noise_key, shape) if box else jax.random.uniform(noise_key, shape)
        action, log_prob = act(obs, noise)
        to_env = jnp.clip(action, ours.action_space.low, ours.action_space.high) if box else action
        step_keys = jax.random.split(step_key, work.num_envs)
        next_obs, state, reward, done, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(step_keys, state, to_env, params)
        return (next_obs, state, key), (obs, action, log_prob, reward.reshape(-1), done)

    @jax.jit
    def rollout(carry):
        carry, steps = jax.lax.scan(one_step, carry, None, work.num_steps)
        return carry, steps, in_parts(value, steps[0])

    held = {"carry": jax.device_put((obs, state, key), device)}

    def run(held):
        held["carry"], steps, _ = rollout(held["carry"])
        return steps

    def outcome(steps) -> dict:
        obs, _, _, reward, done = (np.asarray(x) for x in steps)
        return {"obs": obs[:COMPARED_STEPS], "means": means(obs, reward, done)}

    return repeated(work, run, outcome, held)


@variant("rejax", "rejax", reference="jax-eager", same_draws=False, columns=("train",), requires=("rejax", "gymnax"))
def _rejax(work: Workload) -> Prepared:
    """rejax's PPO: the same network, T, B, epochs and minibatches."""
    import jax
    import rejax

    from rlgraph.bench.jax_variants import repeated
    from rlgraph.devices import jax_device

    _only_ppo(work)
    try:
        agent = rejax.get_algo("ppo").create(
            env=work.env,
            agent_kwargs={"hidden_layer_sizes": work.hidden, "activation": "tanh"},
            num_envs=work.num_envs,
            num_steps=work.num_steps,
            num_epochs=work.num_epochs,
            num_minibatches=work.num_minibatches,
            total_timesteps=10**9,
            eval_freq=10**9,
        )
    except ValueError as error:
        raise Skipped(f"rejax cannot train on {work.env}: {error}") from error
    device = jax_device(work.device)
    iterate = jax.jit(lambda state: agent.train_iteration(state), donate_argnums=(0,))
    with jax.default_device(device):
        held = {"state": _with_small_head(agent.init_state(jax.random.key(work.seed)))}
        # What the untrained policy meets, as the others report of their first iteration.
        _, first = jax.jit(agent.collect_trajectories)(held["state"])
    ends, steps = float(first.done.sum()), work.num_envs * work.num_steps
    outcome = {"means": {"episode ends": (ends / steps, max(ends, 1.0) ** 0.5 / steps)}}

    def run(held):
        held["state"] = iterate(held["state"])
        return held["state"].global_step

    return repeated(work, run, lambda step: outcome, held)


def _with_small_head(state):
    """rejax's state with its actor's last layer as small as ours: untrained, both policies then do the same."""
    import jax

    def smaller(path, x):
        return x * 0.03 if any(getattr(key, "key", "").startswith("action_") for key in path) else x

    actor = state.actor_ts
    return state.replace(actor_ts=actor.replace(params=jax.tree_util.tree_map_with_path(smaller, actor.params)))
