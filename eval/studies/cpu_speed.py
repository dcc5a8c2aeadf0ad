"""Dense decoding on the CPU: this package against transformers on torch, in turns, on the same cores.

    python -m eval.studies.cpu_speed --torch-python PATH_TO_A_PYTHON_WITH_TORCH --output cpu_speed.json

Both sides run in processes of their own, in float32, from the same GGUF file, bound to the same cores, with the same
numbers of tokens, one warm-up each. Every round runs each side once, in alternating order; the ratio is taken within
rounds, so that what else the machine does weighs on both. torch's threads wait without spinning unless OMP_WAIT_POLICY
says otherwise: spinning against other programs cost it a factor of three. Standard library only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.studies.cpu_speed", description="Dense decoding on the CPU against transformers on torch."
    )
    parser.add_argument("--torch-python", required=True, help="an interpreter that has torch, transformers and gguf")
    parser.add_argument("--gguf", type=Path, help="the model (default: the one that is installed)")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--generation-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=3, help="runs of each side in a round")
    parser.add_argument("--output", type=Path, help="write the JSON to this file as well")
    return parser.parse_args(argv)


def run(*command: str) -> str:
    """What a command prints on stdout; its own words when it fails."""
    environ = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    if done.returncode:
        sys.exit(f"error: {' '.join(command[:4])} ... failed:\n{done.stderr.strip()}")
    return done.stdout


def installed_model() -> Path:
    code = "from models import registry; print(registry.find(registry.DEFAULT))"
    return Path(run(sys.executable, "-c", code).strip())


def shared_flags(args: argparse.Namespace) -> list[str]:
    names = ("prompt_tokens", "generation_tokens", "threads", "trials")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """One process of this package."""
    flags = ("--json", "--modes", "dense", "--dtype", "float32", "--model", str(args.gguf), *shared_flags(args))
    found = json.loads(run(sys.executable, "-m", "skg_jax.bench", "decode", *flags))
    trials = [{name: trial[name] for name in ("ttft_s", "decode_tok_s")} for trial in found["trials"]]
    return {"environment": found["environment"], "trials": {"skg_jax": trials}}


def theirs(args: argparse.Namespace) -> dict[str, Any]:
    """One process of the peer."""
    script = str(Path(__file__).with_name("cpu_speed_torch.py"))
    return json.loads(run(args.torch_python, script, "--gguf", str(args.gguf), *shared_flags(args)))


def medians(rounds: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Of every way to run one side: the median over all rounds and trials, and its sample size."""
    found = {}
    for way in rounds[0]["trials"]:
        values = [trial[name] for one in rounds for trial in one["trials"][way]]
        found[way] = {"median": statistics.median(values), "n": len(values)}
    return found


def ratios(mine: list[dict[str, Any]], peers: list[dict[str, Any]], way: str, name: str) -> dict[str, Any]:
    """Ours over theirs, of the medians within each round."""
    middle = lambda one, key: statistics.median(trial[name] for trial in one["trials"][key])
    values = [middle(a, "skg_jax") / middle(b, way) for a, b in zip(mine, peers, strict=True)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def compare(mine: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, Any]:
    """Both sides and their ratio; the peer counts by its fastest way."""
    found: dict[str, Any] = {}
    for name, best in (("decode_tok_s", max), ("ttft_s", min)):
        theirs = medians(peers, name)
        way = best(theirs, key=lambda way, theirs=theirs: theirs[way]["median"])
        ratio = ratios(mine, peers, way, name)
        found[name] = {"skg_jax": medians(mine, name)["skg_jax"], "torch": theirs, "best": way, "ratio": ratio}
    return found


def table(found: dict[str, Any]) -> str:
    lines = []
    for name, side in found.items():
        for label, value in {"skg_jax": side["skg_jax"], **side["torch"]}.items():
            lines.append(f"{name:<14}{label:<26}{value['median']:>10.2f}{value['n']:>5} runs")
        ratio = side["ratio"]
        spread = f"{ratio['min']:.2f} to {ratio['max']:.2f}, {ratio['n']} rounds"
        lines.append(f"{name:<14}{'ratio to ' + side['best']:<26}{ratio['median']:>10.2f}  ({spread})")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    args.gguf = (args.gguf or installed_model()).resolve()
    mine, peers = [], []
    for index in range(args.rounds):
        sides = [(ours, mine), (theirs, peers)]
        for side, rounds in sides if index % 2 == 0 else sides[::-1]:
            rounds.append(side(args))
        print(f"round {index + 1} of {args.rounds} done", file=sys.stderr)
    found = compare(mine, peers)
    print(table(found))
    if args.output:
        settings = {name: value for name, value in vars(args).items() if isinstance(value, int)}
        record = {"settings": settings | {"model": args.gguf.name}, "comparison": found, "rounds": {"skg_jax": mine}}
        record["rounds"]["torch"] = peers
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
