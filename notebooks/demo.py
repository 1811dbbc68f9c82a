"""Train a small transformer made of fuel_jax ops, beside the same model in plain jax.numpy.

Both start from the same weights and see the same batches of the documentation that ships with
Python.  Their losses are compared at every step and drawn; then the trained weights write a text,
one character at a time, with a key-value cache.  ``make demo`` runs it; ``--help`` tells the rest.
"""

import argparse
import functools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tiny_transformer as model
from jax import Array
from training import BATCH, SEQUENCE, Step, Text, held_out_loss, python_documentation, train

import fuel_jax

STEPS, SEED = 600, 0
PROMPT, TEMPERATURE = "The ", 0.6


class Writer:
    """Writes a text token by token, and counts how often its step is compiled."""

    def __init__(self, config: model.Config, params: model.Params, seed: int):
        self.config, self.params = config, params
        self.compilations = 0
        self.tokens: list[int] = []
        self.logits: list[Array] = []
        key = jax.random.key(seed)

        def step(params: model.Params, cache: model.Cache, token: Array, position: Array):
            self.compilations += 1  # Python runs while JAX traces, and only then
            logits, cache = model.decode(config, params, cache, token, position)
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / TEMPERATURE)
            return drawn.astype(jnp.int32), logits, cache

        self.step = jax.jit(step, donate_argnums=1)  # the cache is updated in its own memory

    def write(self, prompt: Sequence[int]) -> Iterator[int]:
        """The prompt, then the model's own tokens until the context is full."""
        cache = model.empty_cache(self.config)
        token = jnp.asarray(prompt[:1], jnp.int32)
        for position in range(self.config.context):
            if position < len(prompt):
                token = jnp.asarray(prompt[position : position + 1], jnp.int32)
            self.tokens.append(int(token[0]))
            yield self.tokens[-1]
            token, logits, cache = self.step(self.params, cache, token, jnp.int32(position))
            self.logits.append(logits[0])

    def error(self) -> float:
        """Largest difference of its logits from those of one pass over the whole text."""
        tokens = jnp.asarray(self.tokens, jnp.int32)[None]
        whole = jax.jit(functools.partial(model.logits, self.config))(self.params, tokens)[0]
        return float(jnp.max(jnp.abs(whole - jnp.stack(self.logits))))


# -- showing -------------------------------------------------------------------------------


def watched(steps: Iterable[Step], total: int) -> Iterator[Step]:
    """The same steps, behind a progress bar with loss and tokens per second."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        TextColumn("training both"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}, {task.fields[rate]} tokens/s"),
        TimeRemainingColumn(),
    )
    with progress:
        bar = progress.add_task("", total=total, loss="…", rate="…")
        for i, step in enumerate(steps, 1):
            loss, rate = f"{step.losses[0]:.3f}", f"{BATCH * SEQUENCE / step.seconds[0]:,.0f}"
            progress.update(bar, advance=1, loss=loss, rate=rate)
            if i % 100 == 0:
                progress.console.print(f"step {i}: loss {loss}, {rate} tokens/s", highlight=False)
            yield step


def draw(steps: Sequence[Step], caption: str, path: pathlib.Path) -> None:
    """Both loss curves, and under them their difference."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    ours, theirs = np.array([step.losses for step in steps]).T
    gap, at = np.abs(ours - theirs), np.arange(1, len(steps) + 1)
    figure, (curves, gaps) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    curves.plot(at, theirs, color="#E69F00", linewidth=4, label="plain jax.numpy")
    curves.plot(at, ours, color="#0072B2", linewidth=1.2, label="fuel_jax ops")
    curves.set(ylabel="loss, nats per character", ylim=(0, None))
    curves.set_title("One transformer written twice: the curves lie on each other", loc="left")
    curves.legend(frameon=False)
    gaps.semilogy(at[gap > 0], gap[gap > 0], ".", color="#555555", markersize=2)
    gaps.set(xlabel="step", ylabel="|difference|", xlim=(0, len(steps)))
    for axes in (curves, gaps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.supxlabel(caption, fontsize=8, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def report(config: model.Config, steps: Sequence[Step], text: Text, path: pathlib.Path) -> None:
    """The numbers, and the picture of them."""
    gap, at = max((abs(s.losses[0] - s.losses[1]), i) for i, s in enumerate(steps, 1))
    settled = steps[len(steps) // 10 :]  # the first ones compile
    ours, theirs = (1e3 * statistics.median(s.seconds[i] for s in settled) for i in (0, 1))
    first = steps[0].losses[0]
    last = statistics.fmean(s.losses[0] for s in steps[-max(1, len(steps) // 10) :])
    held_out = held_out_loss(config, steps[-1].params, text)
    rates = [f"{1e3 * BATCH * SEQUENCE / t:,.0f}" for t in (ours, theirs)]
    print(f"""
loss        {first:.2f} → {last:.2f} nats per character, {held_out:.2f} on held-out text
            (guessing any character: {math.log(config.vocabulary):.2f})
agreement   the two curves differ by at most {gap:.1e}, at step {at} of {len(steps)}
step time   fuel_jax {ours:.1f} ms, plain jax.numpy {theirs:.1f} ms: ratio {ours / theirs:.2f}
tokens/s    fuel_jax {rates[0]}, plain jax.numpy {rates[1]}""")
    draw(
        steps,
        f"largest difference {gap:.1e};  step {ours:.0f} ms against {theirs:.0f} ms, "
        f"ratio {ours / theirs:.2f};  {running_on()}",
        path,
    )
    print(f"picture     {path}\n")


def running_on() -> str:
    """JAX and device."""
    return f"JAX {jax.__version__} on {jax.devices()[0].device_kind}"


def require_report_packages() -> None:
    """Say what to install before two minutes of training, not after."""
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"demo: {error.name!r} is missing; it comes with the extra 'report': "
            "pip install 'fuel-jax[report]'.  `make demo` installs it by itself."
        )


def demonstrate(config: model.Config, text: Text, asked: argparse.Namespace) -> None:
    """Train, report, write."""
    weights = model.init(config, jax.random.key(asked.seed))
    count = sum(p.size for p in jax.tree.leaves(weights))
    print(f"{len(text.train):,} characters of Python's documentation, {count:,} weights")
    print(running_on())
    q, k = (
        jnp.zeros((BATCH, heads, SEQUENCE, config.head_width), jnp.float32)
        for heads in (config.heads, config.kv_heads)
    )
    print("\nWho runs, for the op that matters most:")
    print(fuel_jax.flash_attn.explain(q, k, k, causal=True), "\n")

    steps = list(watched(train(config, weights, text, asked.steps, asked.seed), asked.steps))
    report(config, steps, text, asked.out)

    writer = Writer(config, steps[-1].params, asked.seed)
    for token in writer.write(text.encode(asked.prompt)):
        print(text.characters[token], end="", flush=True)
    print(f"""

decoding    {len(writer.tokens)} positions, compilations: {writer.compilations}
            logits as in one pass over the whole text, to {writer.error():.1e}""")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and demonstrate."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="On many devices: many_devices.py --mesh data=2,model=2,sequence=2, beside this.",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{STEPS} if not given")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights, batches and writing")
    parser.add_argument("--prompt", default=PROMPT, help="what the text begins with")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/demo.png"))
    asked = parser.parse_args(arguments)
    text = python_documentation()
    if not 0 < len(asked.prompt) < SEQUENCE or not set(asked.prompt) <= set(text.characters):
        parser.error(f"a prompt is 1 to {SEQUENCE - 1} characters, each of them in the text")
    if asked.steps < 1:
        parser.error("there must be at least one step")
    require_report_packages()

    began = time.perf_counter()
    # fuel_jax multiplies float32 in float32 on every device; let the plain model do so too.
    with jax.default_matmul_precision("highest"):
        demonstrate(model.Config(len(text.characters), context=SEQUENCE), text, asked)
    print(f"in all      {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
