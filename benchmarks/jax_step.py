"""The paper's own way in JAX: ``vmap`` of per-sample gradients, on the paper's ResNet-9.

Run by step.py with a Python that has jax. Prints {"dp-sgd": seconds, "bam": seconds}: one clipped
step, compiled, without noise.
"""

from __future__ import annotations

import argparse
import json
import os
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})

    import jax
    import jax.numpy as jnp

    a, b, c = (4 * round(n * arguments.width / 4) for n in (64, 128, 256))
    shapes = [(3, a), (a, b), (b, b), (b, b), (b, c), (c, c), (c, c), (c, c)]
    keys = jax.random.split(jax.random.PRNGKey(0), len(shapes) + 1)
    theta = {
        str(i): {
            "w": jax.random.normal(k, (o, f, 3, 3)) / (9 * f) ** 0.5,
            "s": jnp.ones(o),
            "t": jnp.zeros(o),
        }
        for i, (k, (f, o)) in enumerate(zip(keys, shapes, strict=False))
    }
    theta["head"] = {
        "w": jax.random.normal(keys[-1], (10, 4 * c)) / (4 * c) ** 0.5,
        "b": jnp.zeros(10),
    }

    def block(p, x):
        w = p["w"] - p["w"].mean((1, 2, 3), keepdims=True)
        x = jax.lax.conv(x[None], w, (1, 1), "SAME")[0]
        groups = min(32, x.shape[0] // 2)
        g = x.reshape(groups, -1)
        g = (g - g.mean(1, keepdims=True)) * jax.lax.rsqrt(g.var(1, keepdims=True) + 1e-5)
        x = g.reshape(x.shape) * p["s"][:, None, None] + p["t"][:, None, None]
        return x * jnp.tanh(jax.nn.softplus(x))

    def pool(x):
        n, h, w = x.shape
        return x.reshape(n, h // 2, 2, w // 2, 2).mean((2, 4))

    def loss(theta, x, y):
        x = pool(block(theta["1"], block(theta["0"], x)))
        x = x + block(theta["3"], block(theta["2"], x))
        x = pool(block(theta["5"], pool(block(theta["4"], x))))
        x = x + block(theta["7"], block(theta["6"], x))
        logits = theta["head"]["w"] @ pool(x).reshape(-1) + theta["head"]["b"]
        return -jax.nn.log_softmax(logits)[y]

    def norm(tree):
        return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree_util.tree_leaves(tree)))

    gradient = jax.grad(loss)

    def bam(theta, x, y):
        g = gradient(theta, x, y)
        moved = jax.tree_util.tree_map(lambda t, u: t + 0.02 * u / norm(g), theta, g)
        return gradient(moved, x, y)

    def clipped(direction):
        def step(theta, xs, ys):
            d = jax.vmap(direction, (None, 0, 0))(theta, xs, ys)
            scale = jnp.minimum(1.0, 1.0 / jax.vmap(norm)(d))
            return jax.tree_util.tree_map(lambda t: jnp.tensordot(scale, t, 1), d)

        return jax.jit(step)

    xs = jax.random.normal(keys[0], (arguments.batch, 3, 32, 32))
    ys = jnp.arange(arguments.batch) % 10
    now = time.process_time if arguments.clock == "cpu" else time.perf_counter
    out = {}
    for name, direction in (("dp-sgd", gradient), ("bam", bam)):
        run = clipped(direction)
        jax.block_until_ready(run(theta, xs, ys))
        best = float("inf")
        for _ in range(arguments.repeats):
            begin = now()
            jax.block_until_ready(run(theta, xs, ys))
            best = min(best, now() - begin)
        out[name] = best
    print(json.dumps(out))


if __name__ == "__main__":
    main()
