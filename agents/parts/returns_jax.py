"""Sums along time, without a loop over it. T steps, B environments."""

import jax
import jax.numpy as jnp


def linear_scan(c_TB: jax.Array, x_TB: jax.Array) -> jax.Array:
    """y[t] = x[t] + c[t] y[t+1] with y[T] = 0, as an associative scan: about log2 T dependent rounds, not T.

    Where c[t] is 0, y[t] is x[t], also if y[t+1] is infinite or no number.
    """

    def chain(later, earlier):
        (c_later, x_later), (c, x) = later, earlier
        return c * c_later, jnp.where(c == 0, x, x + c * x_later)

    return jax.lax.associative_scan(chain, (c_TB, x_TB), reverse=True)[1]


def gae(reward_TB, value_TB, final_value_TB, terminated_TB, truncated_TB, gamma: float, gae_lambda: float):
    """Generalised advantage estimation (Schulman et al., 2016, eq. 16).

    An episode that terminated has no future; one that was truncated goes on from the value of its final observation,
    as does the last step of the rollout. Nothing leaks from one episode into the one before it, no NaN either.

    Args:
        reward_TB, value_TB: [T, B] float32.
        final_value_TB: [T, B] float32, value of the observation that step t led to, before any reset.
        terminated_TB, truncated_TB: [T, B] bool.

    Returns:
        Advantages [T, B]; the value targets are these plus `value_TB`.
    """
    future_TB = jnp.where(terminated_TB, 0, final_value_TB)  # not a product: 0 times infinity is no number
    delta_TB = reward_TB + gamma * future_TB - value_TB  # eq. 10
    going_on_TB = ~(terminated_TB | truncated_TB)
    return linear_scan(gamma * gae_lambda * going_on_TB.astype(jnp.float32), delta_TB)


def discounted_returns(reward_TB, done_TB, return_B, gamma: float):
    """Running discounted return of each environment, starting afresh after each episode.

    Args:
        reward_TB: [T, B] float32.
        done_TB: [T, B] bool, step t ended its episode.
        return_B: [B] float32, the running return before the first step, 0 where an episode starts.

    Returns:
        g [T, B] with g[t] = r[t] + gamma g[t-1] within an episode, and the [B] to start the next rollout with.
    """
    going_on_TB = jnp.concatenate([jnp.ones_like(done_TB[:1]), ~done_TB[:-1]])
    x_TB = reward_TB.at[0].add(gamma * return_B)
    g_TB = linear_scan((gamma * going_on_TB.astype(jnp.float32))[::-1], x_TB[::-1])[::-1]
    return g_TB, jnp.where(done_TB[-1], 0, g_TB[-1])


def lambda_returns(reward_TB, final_value_TB, terminated_TB, truncated_TB, gamma: float, q_lambda: float):
    """Peng's Q(lambda) (Peng & Williams, 1996), the targets of PQN (Gallici et al., 2024, algorithm 1).

    G[t] = r[t] + gamma ((1 - lambda) V'[t] + lambda G[t+1]), with V'[t] the greatest action value that step t led to.
    An episode that terminated has no future; one that was truncated goes on from V' alone, as does the last step of
    the rollout. Nothing leaks from one episode into the one before it.

    Args:
        reward_TB: [T, B] float32.
        final_value_TB: [T, B] float32, V': max_a Q of the observation that step t led to, before any reset.
        terminated_TB, truncated_TB: [T, B] bool.

    Returns:
        G [T, B].
    """
    going_on_TB = ~(terminated_TB | truncated_TB)
    lambda_TB = q_lambda * going_on_TB.at[-1].set(False).astype(jnp.float32)
    # Where lambda is 1, V' is left out as well.
    future_TB = jnp.where(terminated_TB | (lambda_TB == 1), 0, final_value_TB)
    x_TB = reward_TB + gamma * (1 - lambda_TB) * future_TB
    return linear_scan(gamma * lambda_TB, x_TB)
