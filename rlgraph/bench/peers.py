"""What a user would otherwise pick: Gymnasium's own vector environment, gymnax and rejax, on the same work."""

import gymnasium
import numpy as np
import torch

from rlgraph.agents.ppo_torch import PPO
from rlgraph.bench.torch_variants import timer
from rlgraph.bench.variants import COMPARED_STEPS, Prepared, Skipped, Workload, means, variant

MOST_PYTHON_ENVIRONMENTS = 4096  # Gymnasium's environments without a vector version run one after the other


@variant("gymnasium", "gymnasium", reference="torch-eager", same_draws=False, columns=("env", "policy"))
def _gymnasium(work: Workload) -> Prepared:
    """gymnasium.make_vec on the CPU; with a policy, in torch on the device, with the copies that this takes."""
    if work.env not in gymnasium.registry:
        raise Skipped(f"Gymnasium has no {work.env}")
    vectorised = gymnasium.spec(work.env).vector_entry_point is not None
    if not vectorised and work.num_envs > MOST_PYTHON_ENVIRONMENTS:
        raise Skipped(f"{work.num_envs} environments one after the other in Python would take minutes a repeat")
    envs = gymnasium.make_vec(
        work.env, work.num_envs, vectorization_mode="vector_entry_point" if vectorised else "sync"
    )
    policy = PPO.build_policy(work.config("torch", "eager"), work.environment())
    device = policy.obs_mean.device
    generator = torch.Generator(device).manual_seed(work.seed)
    rng = np.random.default_rng(work.seed)
    space, discrete = envs.single_action_space, isinstance(envs.single_action_space, gymnasium.spaces.Discrete)
    shape = (work.num_envs, *space.shape)
    held, seen = {"obs": envs.reset(seed=work.seed)[0], "done": np.zeros(work.num_envs, bool)}, {}

    def actions(obs):
        if work.column == "env":
            return rng.integers(space.n, size=shape) if discrete else rng.normal(0, space.high, shape)
        draw = torch.rand if discrete else torch.randn
        with torch.no_grad():
            action, _ = policy.act(torch.as_tensor(obs, device=device), draw(shape, generator=generator, device=device))
        return action.cpu().numpy()

    def run():
        rows = []
        for _ in range(work.num_steps):
            action = actions(held["obs"])
            if not discrete:
                action = np.clip(action, space.low, space.high).astype(np.float32)
            obs, reward, terminated, truncated, _ = envs.step(action)
            # In the step after an end Gymnasium only resets; the other variants have no such step.
            rows.append((held["obs"], reward, terminated | truncated, ~held["done"]))
            held["obs"], held["done"] = obs, terminated | truncated
        seen["rows"] = rows

    def outcome() -> dict:
        obs, reward, done, counted = (np.stack(column) for column in zip(*seen["rows"]))
        return {"obs": obs[:COMPARED_STEPS], "means": means(obs, reward, done, counted)}

    # The host takes part in every step, so the clock is the measure, also on a GPU.
    return Prepared(timer(run, torch.device("cpu")), outcome, launches=lambda: 0)


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

    from rlgraph.agents import ppo_jax
    from rlgraph.bench.jax_variants import random_policy, repeated
    from rlgraph.devices import jax_device

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
        return carry, steps, value(steps[0])

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
        held = {"state": agent.init_state(jax.random.key(work.seed))}
        # What the untrained policy meets, as the others report of their first iteration.
        _, first = jax.jit(agent.collect_trajectories)(held["state"])
    ends, steps = float(first.done.sum()), work.num_envs * work.num_steps
    outcome = {"means": {"episode ends": (ends / steps, max(ends, 1.0) ** 0.5 / steps)}}

    def run(held):
        held["state"] = iterate(held["state"])
        return held["state"].global_step

    return repeated(work, run, lambda step: outcome, held)
