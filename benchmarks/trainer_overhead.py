"""What the trainer itself costs: the share of a step that is not the private gradient.

    python benchmarks/trainer_overhead.py [--width 1.0] [--batch-size 256] [--views 4] [--steps 6]

A run of ResNet-9 on images of CIFAR-10's size (random pixels: no download) is measured from inside.
Counted as the trainer's own work is everything but the engine's directions, norms and weighted
sums, the noise and the optimiser, which every private training has to pay: sampling, gathering,
moving to the device, augmentation, clipping factors, the ledger's write, the look at the loss,
reports and logs. Evaluations and checkpoints are left out: how often they come is the operator's
choice; their seconds are shown apart. Seconds are of the processor, with torch on one thread: those
of the reading threads count as the trainer's.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpbam.data import from_arrays


def cifar_sized(split: str) -> object:
    """Random images of CIFAR-10's shape, as a user's data set."""
    n = 50_000 if split == "train" else 1_000
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (n, 32, 32, 3), np.uint8)
    return from_arrays(pixels, rng.integers(0, 10, n), name=f"random/{split}")


class Stopwatch:
    """Adds up the seconds that named functions take on their thread; nested calls count once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._depth = 0

    def around(self, owner: object, name: str, label: str) -> None:
        real: Callable[..., object] = getattr(owner, name)

        def timed(*args: object, **kwargs: object) -> object:
            self._depth += 1
            began = time.thread_time()
            try:
                return real(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds[label] += time.thread_time() - began

        setattr(owner, name, timed)


def measure(options: argparse.Namespace, out: Path) -> None:
    import torch

    import dpbam.training.trainer as training
    from dpbam.app.runs import RunConfig, checkpoint, prepare
    from dpbam.app.runs.folder import RunFolder
    from dpbam.app.runs.rows import Recorder
    from dpbam.privacy.noise import GaussianNoise

    torch.set_num_threads(1)
    config = RunConfig(
        data="trainer_overhead:cifar_sized", model="resnet9", method=options.method,
        model_options={"width": options.width}, noise_multiplier=1.0, accountant="rdp",
        batch_size=options.batch_size, epochs=(options.steps + 1) * options.batch_size / 50_000,
        augment_multiplicity=options.views, lr=1e-3, seed=0, num_workers=options.num_workers,
        engine=options.engine,
    )  # fmt: skip
    prepared = prepare(config)
    folder = RunFolder(out)
    folder.non_private.mkdir()
    oracle = prepared.oracle(prepared.plan.ledger(folder.ledger))
    fit = prepared.fit(oracle)
    trainer = prepared.trainer(oracle, Recorder(folder))
    trainer.eval_every = None

    watch = Stopwatch()
    engine_directions = oracle.engine.directions

    def directions(*args: object, **kwargs: object) -> object:
        handle = engine_directions(*args, **kwargs)
        watch.around(handle, "norms", "engine")
        watch.around(handle, "weighted_sum", "engine")
        return handle

    oracle.engine.directions = directions
    watch.around(oracle.engine, "directions", "engine")
    watch.around(GaussianNoise, "add", "noise")
    watch.around(type(trainer.optimizer), "step", "optimiser")
    watch.around(oracle.ledger, "charge", "(ledger)")
    watch.around(trainer, "evaluate", "evaluation")
    watch.around(trainer._losses, "observe", "(look at the loss)")
    watch.around(training.EpsilonCurve, "bound", "epsilon")

    marks: list[float] = []

    def after_step() -> None:
        marks.append(time.process_time())
        if len(marks) == 1:
            watch.seconds.clear()  # the first step warms up

    trainer.run(after_step=after_step)
    began = time.process_time()
    checkpoint.save(folder.checkpoints, trainer.state_dict(), {"run": "r"})
    saved = time.process_time() - began

    steps = len(marks) - 1
    rest = watch.seconds.pop("evaluation", 0.0) + watch.seconds.pop("epsilon", 0.0)
    total = marks[-1] - marks[0] - rest
    must = sum(watch.seconds[name] for name in ("engine", "noise", "optimiser"))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {prepared.device}, "
          f"{fit.engine} engine, {config.method}")  # fmt: skip
    print(f"ResNet-9 width {options.width:g}, batch {options.batch_size}, {options.views} views, "
          f"physical batch {fit.rows}, {steps} steps")  # fmt: skip
    print(f"{'seconds a step':<28}{total / steps:10.4f}")
    for name, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
        print(f"  {name:<26}{seconds / steps:10.4f}  {seconds / total:7.2%}")
    print(f"{'trainer, in total':<28}{(total - must) / steps:10.4f}  {(total - must) / total:7.2%}")
    print(f"apart: one checkpoint {saved:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--method", default="bam")
    parser.add_argument("--engine", default="auto")
    with tempfile.TemporaryDirectory() as folder:
        measure(parser.parse_args(), Path(folder))


if __name__ == "__main__":
    main()
