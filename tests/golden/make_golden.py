"""Computes the golden values with torch and transformers, in an environment of their own:

    uv run --no-project --python 3.11 --with torch==2.13.0 --with transformers==5.24.0 --with accelerate==1.15.0 \
        --with gguf==0.19.0 --with regex python -m tests.golden.make_golden --models DIR

`DIR` holds the GGUF files of the built-in models; a model whose file is absent keeps its old values. Everything runs in
float32 on the CPU, with the weights that transformers dequantises from the same file.
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import accelerate  # pyright: ignore[reportMissingImports]
import gguf
import numpy as np
import regex  # pyright: ignore[reportMissingModuleSource]
import tokenizers
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers.utils import chat_template_utils  # pyright: ignore[reportMissingImports]

from tests.golden import FOLDER, prompts, tiny
from tests.golden.bpe_oracle import BYTES, KINDS, Oracle

# Model -> (kind of tokenizer, prompts)
MODELS = {
    "smollm2-135m-instruct": ("smollm", list(prompts.PROMPTS)),
    "qwen2.5-coder-0.5b-instruct": ("qwen2", ["capital", "python", "chat_system"]),
}
STEPS, TOP = 32, 64

# float32 on two libraries differs by about 1e-4 in a logit; a lead below this could flip, and would test nothing.
MIN_MARGIN = 2e-3


def versions() -> dict[str, str]:
    modules = (torch, transformers, tokenizers, accelerate, np, regex)
    return {"python": platform.python_version()} | {module.__name__: module.__version__ for module in modules}


def pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


class Vocabulary:
    """What a GGUF file says about text."""

    def __init__(self, path: Path):
        fields = gguf.GGUFReader(path).fields

        def value(name: str) -> Any:
            return fields[f"tokenizer.{name}"].contents()

        tokens = value("ggml.tokens")
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.merges = [pair(merge) for merge in value("ggml.merges")]
        types = value("ggml.token_type")
        self.special = [token for token, kind in zip(tokens, types, strict=True) if kind in (3, 4)]
        self.template = value("chat_template")

    def oracle(self, kind: str) -> Oracle:
        return Oracle(kind, self.ids, self.merges, self.special)


def render(vocabulary: Vocabulary, chat: str, add_generation_prompt: bool = True) -> str:
    texts, _ = chat_template_utils.render_jinja_template(
        conversations=[prompts.CHATS[chat]],
        chat_template=vocabulary.template,
        add_generation_prompt=add_generation_prompt,
    )
    return texts[0]


@torch.no_grad()
def continuation(model, ids: list[int]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Greedy tokens with their smallest lead, and the logits after the prompt."""
    cache, greedy, leads = transformers.DynamicCache(config=model.config), [], []
    first = logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
    for i in range(STEPS):
        if i:
            logits = model(torch.tensor([greedy[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1]
        two = logits.topk(2)
        leads.append(float(two.values[0] - two.values[1]))
        greedy.append(int(two.indices[0]))
    top = first.topk(TOP)
    entry = {"prompt": ids, "greedy": greedy, "margin": round(min(leads), 5)}
    return entry, {
        "top_ids": top.indices.numpy().astype(np.int32),
        "top_logits": top.values.numpy(),
        "logsumexp": first.logsumexp(0).numpy(),
        "norm": first.norm().numpy(),
    }


def make_model(path: Path, name: str, out: Path) -> None:
    kind, chosen = MODELS[name]
    vocabulary = Vocabulary(path)
    oracle = vocabulary.oracle(kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    entries, arrays = [], []
    for prompt in chosen:
        text = prompts.PROMPTS[prompt]
        if text.startswith("chat:"):
            text = render(vocabulary, text.removeprefix("chat:"))
        entry, values = continuation(model, oracle.encode(text))
        print(f"{name} {prompt}: {len(entry['prompt'])} tokens, margin {entry['margin']}", flush=True)
        if entry["margin"] < MIN_MARGIN:
            raise SystemExit(f"Prompt {prompt!r} has an argmax that leads by {entry['margin']}: choose another text.")
        entries.append({"name": prompt} | entry)
        arrays.append(values)
    write(out / f"{name}.json", {"versions": versions(), "prompts": entries})
    stacked: dict[str, Any] = {key: np.stack([a[key] for a in arrays]) for key in arrays[0]}
    np.savez_compressed(out / f"{name}.npz", **stacked)


@torch.no_grad()
def make_tiny(out: Path) -> None:
    logits: dict[str, Any] = {"versions": np.array(json.dumps(versions()))}
    for name, values in tiny.CONFIGS.items():
        config = transformers.AutoConfig.for_model(**values)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        weights = {key: torch.from_numpy(value) for key, value in tiny.weights(name).items()}
        if values["tie_word_embeddings"]:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights, strict=True)
        logits[name] = model(torch.from_numpy(tiny.tokens(name)).long()).logits[:, tiny.POSITIONS].numpy()
        print(f"tiny {name}: logits with standard deviation {logits[name].std():.2f}")
    np.savez_compressed(out / "tiny.npz", **logits)


def make_text(models: Path, out: Path) -> None:
    """Token ids and rendered conversations."""
    ids, chats = read(out / "tokens.json"), read(out / "chats.json")
    for name, (kind, _) in MODELS.items():
        if not (models / f"{name}.gguf").exists():
            continue
        vocabulary = Vocabulary(models / f"{name}.gguf")
        oracle = vocabulary.oracle(kind)
        ids[kind] = [{"text": text, "ids": oracle.encode(text)} for text in prompts.TEXTS]
        if kind == "qwen2":
            check_qwen(vocabulary, ids[kind])
        chats[name] = [
            {"conversation": chat, "add_generation_prompt": prompt, "text": render(vocabulary, chat, prompt)}
            for chat in prompts.CHATS
            for prompt in (True, False)
        ]
    for kind in KINDS:
        oracle = Oracle(kind, *synthetic(), prompts.SPECIAL + prompts.USER_DEFINED)
        ids[f"synthetic {kind}"] = [{"text": text, "ids": oracle.encode(text)} for text in prompts.TEXTS]
    write(out / "tokens.json", ids | {"versions": versions()})
    write(out / "chats.json", chats | {"versions": versions()})


def synthetic() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of prompts.py: special tokens, bytes, merges, whole words."""
    merges = [pair(merge) for merge in prompts.MERGES]
    merged = ["".join(merge) for merge in merges]
    tokens = prompts.SPECIAL + prompts.USER_DEFINED + sorted(BYTES.values()) + merged + prompts.WHOLE_WORDS
    assert len(set(tokens)) == len(tokens)
    return {token: i for i, token in enumerate(tokens)}, merges


def check_qwen(vocabulary: Vocabulary, entries: list[dict[str, Any]]) -> None:
    """transformers has Qwen's rules itself: two independent oracles must agree."""
    added = [tokenizers.AddedToken(token, normalized=False) for token in vocabulary.special]
    theirs = transformers.Qwen2Tokenizer(vocab=vocabulary.ids, merges=vocabulary.merges)
    theirs.add_tokens(added)
    for entry in entries:
        found = theirs(entry["text"], add_special_tokens=False)["input_ids"]
        if found != entry["ids"]:
            raise SystemExit(f"The oracles disagree on {entry['text']!r}: {found} and {entry['ids']}.")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder with NAME.gguf of the built-in models")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    parser.add_argument("--only", choices=["tiny", "text", *MODELS], help="one part instead of everything")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.only in (None, "tiny"):
        make_tiny(args.out)
    if args.only in (None, "text"):
        make_text(args.models, args.out)
    for name in MODELS:
        if args.only in (None, name) and (args.models / f"{name}.gguf").exists():
            make_model(args.models / f"{name}.gguf", name, args.out)


if __name__ == "__main__":
    main()
