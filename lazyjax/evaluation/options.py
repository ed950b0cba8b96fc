"""Options that `lazyjax evaluate` and `lazyjax generate` share."""

from __future__ import annotations

import argparse

from lazyjax.execution.decode import Sampling
from lazyjax.planning.commands.plan import number


def add_decoding_options(parser: argparse.ArgumentParser, *, new_tokens: int) -> None:
    """How answers are written."""
    whole, amount = number(1, int), number(0, float)
    parser.add_argument(
        "--new-tokens",
        type=whole,
        default=new_tokens,
        help=f"most tokens of an answer (default {new_tokens})",
    )
    parser.add_argument("--temperature", type=amount, default=0.0, help="0 (the default): greedy")
    parser.add_argument("--top-p", type=amount, default=1.0, help="draw from the likeliest tokens only")
    parser.add_argument("--seed", type=number(0, int), default=42, help="of what is drawn (default 42)")
    parser.add_argument("--batch", type=whole, help="rows decoded together (default: planned)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the mathematics")
    parser.add_argument(
        "--hardware", help="preset or profile file: the batch is then chosen by the cost model"
    )


def sampling_of(options: argparse.Namespace) -> Sampling:
    """What the options say about sampling; raises ValueError for values out of range."""
    return Sampling(options.temperature, options.top_p, options.seed)
