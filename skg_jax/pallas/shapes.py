"""Real shapes of every kernel by name, shared by tests, benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedDecodeShape:
    """One layer of one decode step."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # tokens of a row
    share: float = 1.0  # of the pages that is listed
    page_size: int = 16

    @property
    def pages(self) -> int:
        """Pages on a list."""
        return max(1, round(self.context * self.share) // self.page_size)

    @property
    def kv_bytes(self) -> int:
        """Of the listed keys and values, at two bytes each."""
        return 4 * self.batch * self.kv_heads * self.pages * self.page_size * self.head_dim


_K = 1024
_LLAMA_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_LLAMA_8B_CELLS = [(8, 32), (8, 64), (32, 16), (32, 32), (1, 128)]  # batch, thousand tokens

PAGED_DECODE_SHAPES: dict[str, PagedDecodeShape] = {
    **{
        f"llama-8b-b{batch}-{context}k-page{page}-{share:.0%}": PagedDecodeShape(
            batch=batch, context=context * _K, share=share, page_size=page, **_LLAMA_8B
        )
        for batch, context in _LLAMA_8B_CELLS
        for page in (16, 64)
        for share in (1.0, 0.1)
    },
    "smollm2-135m-b1-8k": PagedDecodeShape(batch=1, heads=9, kv_heads=3, head_dim=64, context=8 * _K),
    "smollm2-135m-b8-8k-10%": PagedDecodeShape(batch=8, heads=9, kv_heads=3, head_dim=64, context=8 * _K, share=0.1),
    "qwen2.5-0.5b-b8-32k": PagedDecodeShape(batch=8, heads=14, kv_heads=2, head_dim=64, context=32 * _K),
    "qwen2.5-1.5b-b8-32k": PagedDecodeShape(batch=8, heads=12, kv_heads=2, head_dim=128, context=32 * _K),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectShape:
    """One layer's page selection of one decode step."""

    batch: int
    kv_heads: int
    groups: int  # query heads per KV head
    context: int  # tokens of a row
    page_size: int = 16

    @property
    def pages(self) -> int:
        """Of a row."""
        return self.context // self.page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditMassShape:
    """The units of one step's audit, over all layers."""

    layers: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # tokens of a row
    units: int
    page_size: int = 16

    @property
    def blocks(self) -> int:
        """Of 64 tokens, in a pool that holds every row."""
        return self.batch * self.context // 64

    @property
    def key_bytes(self) -> int:
        """Of the units' keys, at two bytes a number."""
        return 2 * self.units * self.page_size * self.head_dim


SELECT_SHAPES: dict[str, SelectShape] = {
    **{
        f"llama-8b-b{batch}-{context}k": SelectShape(batch=batch, kv_heads=8, groups=4, context=context * _K)
        for batch, context in [(8, 64), (32, 16), (1, 128)]
    },
    "llama-8b-b8-64k-page64": SelectShape(batch=8, kv_heads=8, groups=4, context=64 * _K, page_size=64),
    "smollm2-135m-b1-8k": SelectShape(batch=1, kv_heads=3, groups=3, context=8 * _K),
    "qwen2.5-0.5b-b8-32k": SelectShape(batch=8, kv_heads=2, groups=7, context=32 * _K),
    "qwen2.5-1.5b-b8-32k": SelectShape(batch=8, kv_heads=2, groups=6, context=32 * _K),
}

AUDIT_MASS_SHAPES: dict[str, AuditMassShape] = {
    **{
        f"llama-8b-b{batch}-{context}k-page{page}": AuditMassShape(
            layers=32, batch=batch, context=context * _K, units=units, page_size=page, **_LLAMA_8B
        )
        for batch, context, units in [(8, 64, 20480), (32, 16, 20480), (1, 128, 5120)]
        for page in (16, 64)
    },
    "llama-8b-b8-64k-page32": AuditMassShape(
        layers=32, batch=8, context=64 * _K, units=20480, page_size=32, **_LLAMA_8B
    ),
    "smollm2-135m-b1-8k": AuditMassShape(
        layers=30, batch=1, heads=9, kv_heads=3, head_dim=64, context=8 * _K, units=460
    ),
    "qwen2.5-0.5b-b8-32k": AuditMassShape(
        layers=24, batch=8, heads=14, kv_heads=2, head_dim=64, context=32 * _K, units=7860
    ),
    "qwen2.5-1.5b-b8-32k": AuditMassShape(
        layers=28, batch=8, heads=12, kv_heads=2, head_dim=128, context=32 * _K, units=9170
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchScoreShape:
    """Sketches of one layer."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    context: int
    page_size: int = 16

    @property
    def blocks(self) -> int:
        """Of a sequence, 64 tokens each."""
        return self.context // 64

    def record_bytes(self, bound: str) -> int:
        """Of a block and head: codes, low and step, norms, and residuals where tokens have bounds of their own."""
        return 64 * self.head_dim // 2 + 4 * self.head_dim + 16 + (128 if bound == "token" else 0)

    def sketch_bytes(self, bound: str) -> int:
        """Of all sequences."""
        return self.batch * self.blocks * self.kv_heads * self.record_bytes(bound)


_LLAMA_8B_KV = {"kv_heads": 8, "group": 4, "head_dim": 128}

SKETCH_SCORE_SHAPES: dict[str, SketchScoreShape] = {
    **{
        f"llama-8b-b{batch}-{context}k-page{page}": SketchScoreShape(
            batch=batch, context=context * _K, page_size=page, **_LLAMA_8B_KV
        )
        for batch, context in [(8, 64), (32, 16), (32, 32), (1, 128)]
        for page in (16, 64)
    },
    "llama-8b-shard-b8-64k": SketchScoreShape(batch=8, kv_heads=1, group=4, head_dim=128, context=64 * _K),
    "smollm2-135m-b8-8k": SketchScoreShape(batch=8, kv_heads=3, group=3, head_dim=64, context=8 * _K),
    "qwen2.5-0.5b-b8-32k": SketchScoreShape(batch=8, kv_heads=2, group=7, head_dim=64, context=32 * _K),
    "qwen2.5-1.5b-b8-32k": SketchScoreShape(batch=8, kv_heads=2, group=6, head_dim=128, context=32 * _K),
    "qwen2.5-7b-b8-32k": SketchScoreShape(batch=8, kv_heads=4, group=7, head_dim=128, context=32 * _K, page_size=32),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SealShape:
    """Blocks that are sealed at once, in all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    blocks: int
    full: int | None = None  # of them; None: all

    @property
    def units(self) -> int:
        """Full blocks, by layer and head."""
        return self.layers * self.kv_heads * (self.blocks if self.full is None else self.full)

    @property
    def bytes_read(self) -> int:
        """Keys and values, at two bytes a number."""
        return self.units * 2 * 64 * self.head_dim * 2

    @property
    def bytes_written(self) -> int:
        """Codes, low and step, residuals, norms of the sketch, norms and checksums of the block."""
        return self.units * (64 * self.head_dim // 2 + 4 * self.head_dim + 128 + 16 + 8 + 32)


_SEALED = {
    "llama-8b": {"layers": 32, "kv_heads": 8, "head_dim": 128},
    "smollm2-135m": {"layers": 30, "kv_heads": 3, "head_dim": 64},
    "qwen2.5-0.5b": {"layers": 24, "kv_heads": 2, "head_dim": 64},
    "qwen2.5-1.5b": {"layers": 28, "kv_heads": 2, "head_dim": 128},
}

SEAL_SHAPES: dict[str, SealShape] = {
    **{
        f"{model}-{what}": SealShape(blocks=blocks, **sizes)
        for model, sizes in _SEALED.items()
        for what, blocks in (("decode-b8", 8), ("prefill-4k", 64))
    },
    "llama-8b-decode-b8-one-full": SealShape(blocks=8, full=1, **_SEALED["llama-8b"]),
}
