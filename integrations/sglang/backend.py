"""SGLang's attention over SGLang's own cache. This module imports SGLang; ``register()`` registers its backend.

SGLang stores a token's keys and values in a slot of ``[slots, K, H]`` and lists each request's slots in
``req_to_token``. Slots form contiguous pages of P, so every P-th entry names a page, and the buffers are viewed as
``[slots / P, K, P, H]`` without a copy. A hybrid pool stores windowed layers separately, under their own slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from ..pages import QUANTISED, Batch, PagedLayer, count
from .checks import check_layer, check_runner

_HOST = "sglang"
_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


@dataclass
class Step:
    """One forward pass. ``windowed`` and ``windowed_slots`` [T] belong to layers that a hybrid pool stores apart."""

    batch: Batch
    windowed: Batch | None = None
    windowed_slots: torch.Tensor | None = None


class ShardfuseBackend(AttentionBackend):
    """``--attention-backend shardfuse``, made from SGLang's ``ModelRunner``.

    Block tables are as wide as the longest context, and the device computes them from its own data: for captured
    decodes inside the graph, so that a replay recomputes them. Nothing waits for the device.

    Raises ValueError for models that the kernel cannot serve.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: Any, *, impl: str = "auto") -> None:
        super().__init__()
        check_runner(runner)
        self.token_to_kv_pool = pool = runner.token_to_kv_pool  # SGLang reads these two attributes
        self.req_to_token_pool = runner.req_to_token_pool
        self.forward_metadata: Step | None = None
        self._runner = runner
        self._impl = impl
        self._layers: dict[Any, PagedLayer] = {}
        self._hybrid = isinstance(pool, SWAKVPool) and any(windowed for _, windowed in pool.layers_mapping.values())
        self._page: int = runner.page_size
        self._firsts = runner.req_to_token_pool.req_to_token[:, :: self._page]  # [requests + 1, pages], slots
        self._starts = self._count_to(runner.req_to_token_pool.size)

    def _count_to(self, sequences: int) -> torch.Tensor:
        return torch.arange(sequences + 1, dtype=torch.int32, device=self._firsts.device)

    # --------------------------------------------------------------------------------------------- before a forward

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the inputs of captured graphs of up to ``max_bs`` sequences, at fixed addresses."""
        if max_bs >= len(self._starts):
            self._starts = self._count_to(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a padding sequence: its one query sees one key, of the row that SGLang reserves."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Raise ValueError for a mode that is not served, or not captured."""
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            return
        if mode not in _EXTENDS:
            raise ValueError(f"the attention backend shardfuse does not serve {mode!r}: choose another one")
        if in_capture:
            raise ValueError(
                "the attention backend shardfuse cannot be captured in a full graph of a prefill: set "
                "--cuda-graph-backend-prefill to breakable or disabled"
            )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Compute the tables of a step on the device; a graph may capture this."""
        fb, sequences = forward_batch, forward_batch.batch_size
        lens = fb.seq_lens[:sequences].to(torch.int32)
        firsts = self._firsts
        queries, longest = 1, None
        if fb.forward_mode.is_decode_or_idle():
            starts = self._starts[: sequences + 1]
        else:
            starts = torch.nn.functional.pad(fb.extend_seq_lens[:sequences].cumsum(0, dtype=torch.int32), (1, 0))
            before, new = fb.extend_prefix_lens_cpu, fb.extend_seq_lens_cpu  # SGLang passes lists on the host
            queries, longest = max(new, default=0), max(map(sum, zip(before, new)), default=0)
            firsts = firsts[:, : max(1, -(-longest // self._page))]
        slots = firsts[fb.req_pool_indices[:sequences]]  # [S, pages]

        def batch(slots: torch.Tensor) -> Batch:
            pages = slots if self._page == 1 else slots.div(self._page, rounding_mode="floor")
            return Batch(pages.to(torch.int32), lens, starts, max_query_len=queries, max_seq_len=longest)

        self.forward_metadata = step = Step(batch(slots))
        if self._hybrid:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            step.windowed = batch(translate(slots))  # no layer reads tokens before the window
            step.windowed_slots = None if fb.out_cache_loc is None else translate(fb.out_cache_loc)

    # ---------------------------------------------------------------------------------------------------- the layers

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write k [T, K * H] and v [T, K * Hv], unless they are None or SGLang wrote them, and attend.

        ``sinks`` [N] is the only supported keyword; others must be None. Returns [T, N * Hv].

        Raises ValueError for another keyword, or for a layer that the kernel cannot serve.
        """
        sinks = kwargs.pop("sinks", None)
        asked = [name for name, value in kwargs.items() if value is not None and value is not False]
        if asked:
            raise ValueError(
                f"the attention backend shardfuse does not serve {', '.join(asked)}, which layer {layer.layer_id} "
                "asks for: choose another one"
            )
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    forward_decode = forward_extend

    @torch.compiler.disable
    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        step, pool = self.forward_metadata, self.token_to_kv_pool
        assert step is not None
        batch = step.batch
        if step.windowed is not None and pool.layers_mapping[layer.layer_id][1]:
            batch = step.windowed
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        scales = (layer.k_scale, layer.v_scale) if buffers[0].dtype in QUANTISED else (None, None)
        if save_kv_cache and k is not None and v is not None:
            slots = KVWriteLoc.for_batch(forward_batch, swa_loc=step.windowed_slots)
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            if scales[0] is not None and k.dtype != buffers[0].dtype:
                k, v = k.clone(), v.clone()  # the pool divides by the scales in place
            pool.set_kv_buffer(layer, slots, k, v, *scales)
            count(_HOST, "writes")
        paged = self._layer(layer)
        paged.sinks = sinks
        out = paged.attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            (self._paged(buffers[0]), self._paged(buffers[1])),
            batch,
            k_scale=_fp32(scales[0]),
            v_scale=_fp32(scales[1]),
        )
        return out.flatten(1)

    def _paged(self, buffer: torch.Tensor) -> torch.Tensor:
        """A view of [slots, K, H] as [pages, K, P, H]."""
        return buffer.unflatten(0, (-1, self._page)).transpose(1, 2)

    def _layer(self, layer: Any) -> PagedLayer:
        paged = self._layers.get(layer)
        if paged is None:
            check_layer(layer, self._runner)
            window = layer.sliding_window_size
            paged = self._layers[layer] = PagedLayer(
                _HOST,
                scale=layer.scaling,
                window=None if window is None or window < 0 else window + 1,  # SGLang does not count the query itself
                softcap=layer.logit_cap,
                impl=self._impl,
            )
        return paged


def _fp32(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.detach().to(torch.float32)
