"""How fast megakit generates, beside transformers' `generate` on the same weights.

    python benchmarks/generate.py [--model FOLDER] [--new 64] [--rounds 3] [--threads 1] [--device cpu|cuda] [--dtype fp32]

Without a folder a Llama of 56 M parameters with random weights. Cases: one prompt and eight, of 16 and of 256 tokens. Each
round runs both, one behind the other, greedily and without an end token; the best round of each counts. Ratios are
transformers' seconds over megakit's. The tokens are compared too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the plain command finds this clone from anywhere

from megakit.checkpoint.weights import DTYPES, open_weights
from megakit.inference.decoder import Decoder
from megakit.inference.generator import generate
from megakit.inference.sampling import Sampling

CASES = ((1, 16), (1, 256), (8, 16), (8, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--new", type=int, default=64, help="tokens to make")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or random_llama(Path(scratch))
        source, device, dtype = open_weights(folder), torch.device(args.device), DTYPES[args.dtype]
        ours = Decoder(source.model, source, device, dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        print(f"{'prompts':>8}{'tokens':>8}{'':>16}{'wall s':>9}{'CPU s':>8}{'tokens/s':>10}{'ratio':>8}{'of CPU s':>10}")
        for batch, length in CASES:
            compare(ours, theirs, batch, length, args.new, args.rounds)


def random_llama(folder: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def compare(ours: Decoder, theirs: transformers.PreTrainedModel, batch: int, length: int, new: int, rounds: int) -> None:
    torch.manual_seed(length)
    prompts = torch.randint(ours.model.vocab_size, (batch, length))

    def megakit() -> list[list[int]]:
        return [list(column) for column in zip(*generate(ours, prompts.tolist(), new, Sampling(0.0)))]

    def of_transformers() -> list[list[int]]:
        ids = prompts.to(ours.device)
        options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, length:].tolist()

    best: dict[str, tuple[float, float]] = {}
    said = {}
    for _ in range(rounds):
        for name, run in (("megakit", megakit), ("transformers", of_transformers)):
            *cost, said[name] = timed(run)
            best[name] = min(best.get(name, (float("inf"),) * 2), tuple(cost))
    for name, (wall, cpu) in best.items():
        ratios = [f"{of_theirs / own:.2f}" for of_theirs, own in zip(best["transformers"], (wall, cpu))]
        shown = f"{ratios[0]:>8}{ratios[1]:>10}" if name == "megakit" else ""
        print(f"{batch:>8}{length:>8}  {name:<14}{wall:>9.2f}{cpu:>8.2f}{batch * new / wall:>10.1f}{shown}")
    same = sum(a == b for a, b in zip(*said.values()))
    print(f"{'':>18}{same} of {batch} texts are the same", flush=True)


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, float, list[list[int]]]:
    wall, cpu = time.perf_counter(), time.process_time()
    said = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu, said


if __name__ == "__main__":
    main()
