"""Modules with the names and the shapes of SGLang's, as far as shardfuse.integrations.sglang uses them.

SGLang has no build that runs on a CPU. What these classes have, the contract names (test_sglang.py compares), and the
contract is compared with SGLang's own sources.
"""

from __future__ import annotations

import enum
import importlib.machinery
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, HEAD_SIZE, CONTEXT = 6, 2, 32, 256


class AttentionBackend:
    """Dispatches as SGLang's does."""

    needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if forward_batch.forward_mode == ForwardMode.IDLE:
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode == ForwardMode.DECODE else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    forward_extend = forward_decode


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    SPLIT_PREFILL = 8

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    def __init__(self, heads: int, head_dim: int, kv_heads: int, layer_id: int, v_head_dim: int = -1) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = heads, kv_heads, kv_heads
        self.qk_head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id = head_dim**-0.5, layer_id
        self.logit_cap, self.logit_capping_method = 0.0, "tanh"
        self.sliding_window_size = -1
        self.is_cross_attention, self.attn_type = False, AttentionType.DECODER
        self.use_irope, self.pos_encoding_mode, self.xai_temperature_len = False, "NONE", -1
        self.k_scale: torch.Tensor | None = None
        self.v_scale: torch.Tensor | None = None


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Any = None, full_loc: Any = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc, swa_loc)


class ReqToTokenPool:
    def __init__(self, size: int, context: int, device: torch.device) -> None:
        self.size = size
        self.req_to_token = torch.zeros(size + 1, context, dtype=torch.int32, device=device)  # row 0: padding


class MHATokenToKVPool:
    """Slots hold NaN until something is written; page 0 is padding's, and holds zeros."""

    kv_cache_layout = "nhd"
    is_quantized_kv_cache = False

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, layer: RadixAttention, layers: int, device: torch.device
    ) -> None:
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self._stored = torch.uint8 if dtype.itemsize == 1 else dtype
        heads = layer.tp_k_head_num
        shapes = [(size + page_size, heads, width) for width in (layer.qk_head_dim, layer.v_head_dim)]
        held = [[torch.full(each, float("nan")).to(dtype).to(device) for each in shapes] for _ in range(layers)]
        self._buffers = [[buffer.view(self._stored) for buffer in pair] for pair in held]
        for pair in self._buffers:
            for buffer in pair:
                buffer[:page_size] = 0

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._buffers[layer_id][0].view(self.dtype)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._buffers[layer_id][1].view(self.dtype)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, k_scale: Any = None,
        v_scale: Any = None, layer_id_override: int | None = None, dcp_kv_mask: Any = None,
    ) -> None:  # fmt: skip
        loc = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        index = layer.layer_id if layer_id_override is None else layer_id_override
        for buffer, rows, scale in zip(self._buffers[index], (cache_k, cache_v), (k_scale, v_scale)):
            if rows.dtype != self.dtype:
                if scale is not None:
                    rows.div_(scale)
                rows = rows.to(self.dtype)
            buffer[loc] = rows.contiguous().view(self._stored)


class HybridLinearKVPool:
    """The layers of a model that keep keys and values, under numbers of their own; others keep a state."""

    def __init__(self, full_kv_pool: MHATokenToKVPool, numbers: dict[int, int]) -> None:
        self.full_kv_pool, self._numbers = full_kv_pool, numbers

    def get_key_buffer(self, layer_id: int, scale: float | None = None) -> torch.Tensor:
        return self.full_kv_pool.get_key_buffer(self._numbers[layer_id])

    def get_value_buffer(self, layer_id: int, scale: float | None = None) -> torch.Tensor:
        return self.full_kv_pool.get_value_buffer(self._numbers[layer_id])

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, k_scale: Any = 1.0, v_scale: Any = 1.0,
        dcp_kv_mask: Any = None,
    ) -> None:  # fmt: skip
        index = self._numbers[layer.layer_id]
        self.full_kv_pool.set_kv_buffer(layer, loc_info, cache_k, cache_v, k_scale, v_scale, layer_id_override=index)


class SWAKVPool:
    """Layer 1 is windowed: its slots are those of layer 0 under ``mapping``."""

    def __init__(self, full_kv_pool: MHATokenToKVPool, swa_kv_pool: MHATokenToKVPool, mapping: torch.Tensor) -> None:
        self.full_kv_pool, self.swa_kv_pool, self._mapping = full_kv_pool, swa_kv_pool, mapping
        self.layers_mapping = {0: (0, False), 1: (0, True)}

    def _part(self, layer_id: int) -> MHATokenToKVPool:
        return self.swa_kv_pool if self.layers_mapping[layer_id][1] else self.full_kv_pool

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._part(layer_id).get_key_buffer(0)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._part(layer_id).get_value_buffer(0)

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self._mapping[kv_indices]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, k_scale: Any = 1.0, v_scale: Any = 1.0
    ) -> None:
        loc = loc_info.swa_loc if self.layers_mapping[layer.layer_id][1] else loc_info.loc
        self._part(layer.layer_id).set_kv_buffer(None, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override=0)


class Server:
    """What the fakes of one test share: backends, choices, and what SGLang's runtime context says."""

    def __init__(self) -> None:
        self.backends: dict[str, Any] = {}
        self.choices = ["triton"]
        self.parallel = types.SimpleNamespace(attn_cp_size=1, attn_dcp_size=1)
        self.exec = types.SimpleNamespace(
            dllm=types.SimpleNamespace(dllm_algorithm=None),
            overlap=types.SimpleNamespace(enable_two_batch_overlap=False),
        )

    def register_attention_backend(self, name: str) -> Any:
        def put(make: Any) -> Any:
            self.backends[name] = make
            return make

        return put


def remove(patch: pytest.MonkeyPatch) -> None:
    """Leave no module of SGLang's, nor any of ours that imported one."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "sglang":
            patch.delitem(sys.modules, name)
        elif name in ("shardfuse.integrations.sglang.backend", "shardfuse.integrations.sglang.checks"):
            del sys.modules[name]  # for good: it holds fakes


def install(patch: pytest.MonkeyPatch, origin: str) -> Server:
    """Put the fakes where SGLang's modules would be; ``origin`` is the file of the package."""
    remove(patch)
    server = Server()
    modules: dict[str, dict[str, Any]] = {
        "sglang": {"__spec__": importlib.machinery.ModuleSpec("sglang", None, origin=origin)},
        "sglang.srt.layers.attention.attention_registry": {
            "register_attention_backend": server.register_attention_backend
        },
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": server.choices,
            "add_attention_backend_choices": server.choices.extend,
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType, "RadixAttention": RadixAttention},
        "sglang.srt.mem_cache.memory_pool": {
            each.__name__: each for each in (HybridLinearKVPool, KVWriteLoc, MHATokenToKVPool)
        },
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
        "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
        "sglang.srt.runtime_context": {"get_exec": lambda: server.exec, "get_parallel": lambda: server.parallel},
    }
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):  # the packages above it
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                patch.setitem(sys.modules, package, types.ModuleType(package))
        module = types.ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
    return server


def _runner(pool: Any, requests: ReqToTokenPool, layers: list[RadixAttention], dtype: torch.dtype, page: int) -> Any:
    """A ``ModelRunner`` with what the backend reads of one."""
    kv_dtype = getattr(pool, "full_kv_pool", pool).dtype
    return types.SimpleNamespace(
        model=torch.nn.ModuleList(layers),
        model_config=types.SimpleNamespace(is_encoder_decoder=False),
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        page_size=page,
        use_mla_backend=False,
        is_draft_worker=False,
        spec_algorithm=types.SimpleNamespace(is_speculative=lambda: False),
        attention_chunk_size=None,
        kv_index_translator=types.SimpleNamespace(is_translating=False),
        req_to_token_pool=requests,
        token_to_kv_pool=pool,
    )


class Case:
    """Requests in a fake pool: ``(prefix, new)`` tokens each, and at most CONTEXT in all.

    Pages are handed out in a random order; prefixes are in the cache, everything else there is NaN.
    """

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
        v_head_size: int = HEAD_SIZE,
        hybrid: bool = False,
        linear: bool = False,
    ) -> None:
        self.lens, self.page, self.dtype = lens, page, dtype
        self.layers = [RadixAttention(HEADS, HEAD_SIZE, KV_HEADS, i, v_head_size) for i in range(2)]
        pages = [-(-(prefix + new) // page) for prefix, new in lens]
        size = page * (sum(pages) + 3)
        self.requests = ReqToTokenPool(len(lens) + 2, CONTEXT, DEVICE)
        self.rows = [2 + i for i in range(len(lens))]  # row 0 is padding's, row 1 is free
        order = iter((torch.randperm(sum(pages) + 3) + 1).tolist())
        for row, count in zip(self.rows, pages):
            slots = torch.cat([torch.arange(page) + page * next(order) for _ in range(count)])[:CONTEXT]
            self.requests.req_to_token[row, : len(slots)] = slots.to(DEVICE, torch.int32)
        layer, make = self.layers[0], MHATokenToKVPool
        cache = dtype if cache is None else cache
        self.mapping = torch.arange(size + page + 1, device=DEVICE)
        if hybrid:  # pages in another order; -1 at the end, as SGLang has it
            moved = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(size // page) + 1])
            slots = (moved[:, None] * page + torch.arange(page)).flatten()
            self.mapping = torch.cat([slots, torch.tensor([-1])]).to(DEVICE)
            parts = [make(size, page, cache, layer, 1, DEVICE) for _ in range(2)]
            self.pool: Any = SWAKVPool(parts[0], parts[1], self.mapping)
        else:
            self.pool = make(size, page, cache, layer, 2, DEVICE)
        if linear:
            self.layers[0].layer_id, self.layers[1].layer_id = 3, 7
            self.pool = HybridLinearKVPool(self.pool, {3: 0, 7: 1})
        self.runner = _runner(self.pool, self.requests, self.layers, dtype, page)
        prefixes = torch.cat([self.slots(row, prefix) for row, (prefix, _) in zip(self.rows, lens)])
        for layer in self.layers:
            k, v = self.rows_of(layer, len(prefixes))
            self.pool.set_kv_buffer(layer, KVWriteLoc(prefixes, self.mapping[prefixes]), k, v, 1.0, 1.0)

    def slots(self, row: int, end: int, start: int = 0) -> torch.Tensor:
        return self.requests.req_to_token[row, start:end].long()

    def rows_of(self, layer: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys and values."""
        k = torch.randn(tokens, layer.tp_k_head_num, layer.qk_head_dim, device=DEVICE).to(self.dtype)
        v = torch.randn(tokens, layer.tp_v_head_num, layer.v_head_dim, device=DEVICE).to(self.dtype)
        return k, v

    def step(self, news: list[int] | None = None, mode: Any = None, padding: int = 0) -> ForwardBatch:
        """The batch of the new tokens, as SGLang's scheduler gives it; ``padding`` sequences as its graphs add."""
        news = [new for _, new in self.lens] if news is None else news
        decode = mode == ForwardMode.DECODE
        prefixes = [prefix for prefix, _ in self.lens]
        both = list(zip(self.rows, prefixes, news))
        loc = torch.cat([self.slots(row, prefix + new, prefix) for row, prefix, new in both])
        tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=DEVICE)
        return ForwardBatch(
            forward_mode=mode or ForwardMode.EXTEND,
            batch_size=len(news) + padding,
            req_pool_indices=tensor([*self.rows, *[0] * padding]),
            seq_lens=tensor([*[prefix + new for _, prefix, new in both], *[1] * padding]),
            out_cache_loc=torch.cat([loc, loc.new_zeros(padding)]),
            extend_seq_lens=None if decode else tensor(news),
            extend_seq_lens_cpu=None if decode else news,
            extend_prefix_lens_cpu=None if decode else prefixes,
        )

    def expected(self, q: torch.Tensor, layer: Any, dtype: torch.dtype, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attention spelled out for each sequence, over what the pool holds in its slots."""
        outs, start = [], 0
        hybrid = isinstance(self.pool, SWAKVPool) and self.pool.layers_mapping[layer.layer_id][1]
        scales = [1.0 if scale is None else scale.to(dtype) for scale in (layer.k_scale, layer.v_scale)]
        for row, (prefix, new) in zip(self.rows, self.lens):
            slots = self.slots(row, prefix + new)
            slots = self.mapping[slots] if hybrid else slots
            k, v = (
                (buffer[slots].to(dtype) * scale).repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)
                for buffer, scale in zip(
                    (self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)), scales
                )
            )  # [N, keys, H]
            scores = q[start : start + new].to(dtype).transpose(0, 1) @ k.mT * layer.scaling  # [N, new, keys]
            if layer.logit_cap:
                scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
            at, key = torch.arange(prefix, prefix + new)[:, None], torch.arange(prefix + new)
            seen = key <= at
            if layer.sliding_window_size > -1:
                seen &= key >= at - layer.sliding_window_size
            scores = scores.masked_fill(~seen.to(DEVICE), float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, new, 1)], -1)
            outs.append((scores.softmax(-1)[..., : prefix + new] @ v).transpose(0, 1))
            start += new
        return torch.cat(outs)
