"""Plot learning curves of several modes over each other, and say how often their medians lie within each other's range.

    python scripts/plot_learning.py --out docs/plots/learning.svg CartPole-v1 eager=FILE fused=FILE Pendulum-v1 eager=…

One panel an environment: its name, then NAME=FILE for each mode, a file that scripts/seeds.py wrote. A line is the
median over seeds, the band around it reaches from the least seed to the greatest. A point is the mean return of the
episodes that ended in an iteration; a seed in which none did keeps its last one.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

from rlgraph.bench.report import dress, pyplot_to_files, save
from rlgraph.errors import UsageError


def panels(words):
    """{environment: {mode: file}}, from the words of the command line."""
    found = {}
    for word in words:
        mode, equals, file = word.partition("=")
        if not equals:
            modes = found.setdefault(word, {})
        elif not found:
            raise UsageError(f"name an environment before {word!r}, such as CartPole-v1 {word}")
        else:
            modes[mode] = file
    empty = [env for env, modes in found.items() if not modes]
    if empty:
        raise UsageError(f"{empty[0]!r} has no curve: follow it with MODE=FILE")
    return found


def read_curve(file, env):
    """(step [P], mean episode return [seeds, P]) of the points from which on every seed has ended an episode.

    Raises:
        UsageError: no such file, not one of scripts/seeds.py with curves, or of another environment.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        words = content["command"].split()
        step = np.array(content["curve"]["step"], dtype=float)
        returns = np.array(content["curve"]["episode_return_per_seed"], dtype=float)  # null becomes NaN
    except OSError as error:
        raise UsageError(f"cannot read {file!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{file!r} holds no learning curves: write it with scripts/seeds.py") from None
    if ("--env", env) not in itertools.pairwise(words):
        raise UsageError(f"{file!r} is not of {env}: it came from {content['command']!r}")
    if returns.ndim != 2 or returns.shape[1:] != step.shape:
        raise UsageError(f"{file!r} is damaged: {step.size} steps, but returns of shape {returns.shape}")
    returns = last_known(returns)
    everyone = ~np.isnan(returns).any(0)
    if not everyone.any():
        raise UsageError(f"in {file!r} some seed has ended no episode: train for longer")
    return step[everyone], returns[:, everyone]


def last_known(returns):
    """[seeds, P], with each NaN replaced by the number before it in its row, where there is one."""
    at = np.where(np.isnan(returns), 0, np.arange(returns.shape[1]))
    return np.take_along_axis(returns, np.maximum.accumulate(at, axis=1), axis=1)


def within(ours, theirs):
    """(points at which the median of our seeds lies between the least and the greatest of theirs, points that both
    have)."""
    _, i, j = np.intersect1d(ours[0], theirs[0], return_indices=True)
    median, seeds = np.median(ours[1][:, i], axis=0), theirs[1][:, j]
    return int(((seeds.min(0) <= median) & (median <= seeds.max(0))).sum()), len(i)


def agreement(env, curves):
    """Of each pair of modes, how often the median of one lies within the range of the other, as a line."""
    parts = []
    for a, b in itertools.permutations(curves, 2):
        inside, points = within(curves[a], curves[b])
        share = f" ({inside / points:.0%})" if points else ""
        parts.append(f"median of {a} within the range of {b} at {inside} of {points} points{share}")
    return f"{env}: {'; '.join(parts) or 'one mode, nothing to compare'}"


def draw(curves_per_env, out):
    """Raises UsageError where matplotlib is missing or cannot write such a file."""
    pyplot = pyplot_to_files()
    figure, axes = pyplot.subplots(1, len(curves_per_env), figsize=(6.2 * len(curves_per_env), 5), squeeze=False)
    for axis, (env, curves) in zip(axes[0], curves_per_env.items(), strict=True):
        for mode, (step, returns) in curves.items():
            (line,) = axis.plot(step, np.median(returns, axis=0), label=f"{mode}, {len(returns)} seeds", linewidth=1.3)
            axis.fill_between(step, returns.min(0), returns.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
        dress(axis, "environment steps", "mean episode return")
        axis.set_title(env, fontsize=10)
    figure.tight_layout()
    try:
        save(figure, out)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {out!r}: {error}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="+", metavar="WORD", help="ENV MODE=FILE MODE=FILE ..., for each panel")
    parser.add_argument("--out", required=True, help="picture to write, .svg or .png")
    args = parser.parse_args()
    try:
        files = panels(args.words)
        curves = {env: {mode: read_curve(file, env) for mode, file in modes.items()} for env, modes in files.items()}
        draw(curves, args.out)
    except UsageError as error:
        raise SystemExit(f"plot_learning: {error}") from None
    for env, modes in curves.items():
        print(agreement(env, modes))


if __name__ == "__main__":
    main()
