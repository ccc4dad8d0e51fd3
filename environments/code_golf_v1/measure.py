"""Measures how often a model passes each task: the numbers that stand beside the tasks. For maintainers.

    python measure.py --model FOLDER [--subset default] [--samples 64] [--replies FILE]

Needs torch and transformers, besides this package's own modules; no Verifiers and no engine. The prompt is rendered as
Verifiers' default renderer does it: the checkpoint's own chat template with a generation prompt. Programs run under the
same limits as in a rollout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from code_golf_v1.sandbox import run_confined
from code_golf_v1.scoring import is_correct, program_of
from code_golf_v1.tasks import SUBSETS, SYSTEM_PROMPT, Golf


def main() -> None:
    options = parse()
    golfs = SUBSETS[options.subset]
    model = Model(options.model, options.threads)
    replies: dict[str, list[str]] = {}
    print(f"{'task':24} {'passed':>8} {'rate':>6} {'stated':>6} {'chars':>6} {'s':>5}  endings")
    rates = []
    for golf in golfs:
        started = time.monotonic()
        replies[golf.name] = model.sample(golf.prompt, options)
        passed, endings = asyncio.run(score(golf, replies[golf.name]))
        rates.append(sum(passed) / options.samples)
        chars = sum(len(reply) for reply in replies[golf.name]) / options.samples
        print(
            f"{golf.name:24} {sum(passed):>4}/{options.samples:<3} {rates[-1]:6.2f} {golf.pass_rate:6.2f} {chars:6.0f} "
            f"{time.monotonic() - started:5.0f}  {dict(endings)}",
            flush=True,
        )
    print(f"{'mean':24} {'':8} {sum(rates) / len(rates):6.2f} {sum(g.pass_rate for g in golfs) / len(golfs):6.2f}")
    if options.replies:
        options.replies.write_text(json.dumps(replies, indent=1, ensure_ascii=False), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How often does a model pass each task?")
    parser.add_argument("--model", required=True, type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--subset", default="default", choices=sorted(SUBSETS))
    parser.add_argument("--samples", type=int, default=64, help="replies per task")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--replies", type=Path, help="write all replies to this file, for reading")
    return parser.parse_args()


async def score(golf: Golf, replies: Sequence[str]) -> tuple[list[bool], Counter[str]]:
    outcomes = await asyncio.gather(*(run_confined(program_of(reply)) for reply in replies))
    passed = [outcome.ok and is_correct(outcome.stdout, golf.expected) for outcome in outcomes]
    return passed, Counter(f"{outcome.ending} {outcome.code}" for outcome in outcomes)


class Model:
    """A checkpoint in float32, sampled from without any filter: top-k and top-p are off."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self.torch = torch
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def sample(self, prompt: str, options: argparse.Namespace) -> list[str]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        self.torch.manual_seed(options.seed)
        with self.torch.inference_mode():
            sequences = self.model.generate(
                **inputs,
                do_sample=True,
                temperature=options.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=options.max_new_tokens,
                num_return_sequences=options.samples,
                eos_token_id=end,
                pad_token_id=end,
                cache_implementation="static",  # the dynamic cache is copied at every token
                disable_compile=True,
            )
        replies = sequences[:, inputs["input_ids"].shape[1] :]
        return [self.tokenizer.decode(reply, skip_special_tokens=True) for reply in replies]


if __name__ == "__main__":
    main()
