"""Verbs of training: `dspark train` and `dspark audit`."""

import dataclasses

import numpy as np
import tyro

from dspark_jax import arguments, audit, processes, recipes, report, report_training
from dspark_jax.config_training import TrainConfig
from dspark_jax.train import holdout, reopen, session
from dspark_jax.train.data import Conversation
from dspark_jax.weights.load import LoadedTarget, load_drafter, load_target


def run_train(argv: list[str]) -> None:
    """`dspark train CONFIG.py[:NAME] [--overrides] [--dry-run] [--distributed HOW]`."""
    if not argv or argv[0].startswith("-"):
        raise ValueError("dspark train needs a config file first: dspark train configs/tiny.py")
    args = tyro.cli(
        arguments.Train,
        args=argv[1:],
        default=arguments.Train(config=recipes.read(argv[0])),
        prog=f"dspark train {argv[0]}",
        config=(tyro.conf.AvoidSubcommands,),
    )
    if args.distributed is not None:
        processes.meet(args.distributed)
    if args.dry_run:
        with report.err.status("compiling a step ..."):
            budget = session.dry_run(args.config)
        report_training.print_budget(budget)
    else:
        session.train(args.config)


def run_audit(args: arguments.Audit) -> None:
    """`dspark audit`."""
    if args.run is None and args.data is None:
        raise ValueError("run and data are both missing: give the work folder of a run, or data")
    if args.samples < 1 or args.drafter == "none":
        raise ValueError(
            f"samples = {args.samples}, drafter = {args.drafter!r}: at least one, and a drafter"
        )
    config = None if args.run is None else reopen.configs(args.run)[0]
    if config is None:
        target = load_target(args.target or "smollm2")
    else:
        target = load_target(args.target or config.target, config.target_dtype)
    name = args.drafter or (str(args.run / "drafter") if args.run else "bundled")
    decoded = load_drafter(name, target.model, format=args.format)
    trained = decoded if args.run is None else reopen.drafter(args.run, target.model)
    samples = _samples(args, config, target)
    with report.err.status(f"replaying {len(samples)} samples ..."):
        found = audit.audit(target.model, trained, decoded, samples)
    report_training.print_audit(found, len(samples))
    if not found.passed:
        raise SystemExit(1)


def _samples(
    args: arguments.Audit, config: TrainConfig | None, target: LoadedTarget
) -> list[Conversation]:
    """Some conversations that were trained on."""
    if config is None:
        config = TrainConfig(data=str(args.data), workdir="", target=target.name)
    if args.data is not None:
        config = dataclasses.replace(config, data=str(args.data), holdout=0, evaluate_every=0)
    corpus, _ = holdout.split(session.read_corpus(config, target), config.holdout, config.seed)
    order = np.random.default_rng(0).permutation(len(corpus.conversations))[: args.samples].tolist()
    chosen = [corpus.conversations[i] for i in order]
    return [
        c.replace(tokens=c.tokens[: args.max_length], loss_mask=c.loss_mask[: args.max_length])
        for c in chosen
    ]
