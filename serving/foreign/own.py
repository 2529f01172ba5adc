"""Attention of models that do not use transformers' interface: within a pass their modules run our forward.

Each forward uses the module's own projections and settings, and differs from the modeling file in the attention alone.
It reads the module through a :class:`~shardfuse.layers.fuse.view.View` with the sizes of this rank's heads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ...layers.fuse.view import View
from ...parallel.core.mesh import SINGLE, Group
from . import step
from .step import Loan

Attend = Callable[..., torch.Tensor]  # q [1, N/R, T, H], k, v -> [1, T, N/R, Hv], as Pass.attend without its module


def loans(model: nn.Module) -> Iterator[Loan]:
    """The loans of a pass: our forward for each module whose model this file covers."""
    for module in model.modules():
        names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.")]
        forward = next((FORWARDS[name] for name in names if name in FORWARDS), None)
        if forward is not None:
            yield Loan(module, "forward", partial(_run, module, forward))


def _run(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    here = step.current()
    if here is None or here.batch is None:
        own = step.before(module, "forward")
        return own(*args, **kwargs) if own is not None else type(module).forward(module, *args, **kwargs)
    match: Any = getattr(module, "_match", None)
    group: Group = SINGLE if match is None else match.group
    sizes = {} if group.size == 1 else match.sizes
    view = View(module, {**sizes, "_group": group, "_modeling": _modeling(module)})
    return forward(view, partial(here.attend, module), *args, **kwargs)


def _modeling(module: Any) -> str:
    """The name of the modeling file of the module's stock class."""
    return str(getattr(type(module), "_stock", type(module)).__module__)


def _of_rank(slopes: torch.Tensor, group: Group) -> torch.Tensor:
    """[N] -> this rank's [N/R], fp32."""
    count = slopes.shape[0] // group.size
    return slopes[group.rank * count :][:count].float().contiguous()


@functools.cache
def _built_slopes(modeling: str, heads: int, device: torch.device) -> torch.Tensor:
    """The slopes [N]: the biases that the file's own ``build_alibi_tensor`` gives a second key."""
    build: Any = sys.modules[modeling].build_alibi_tensor
    slopes: torch.Tensor = build(torch.ones(1, 2, dtype=torch.int64, device=device), heads, torch.float32)[:, 0, 1]
    return slopes


def _bloom(module: Any, attend: Attend, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any) -> Any:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    slopes = _built_slopes(module._modeling, module.num_heads * module._group.size, q.device)
    out = attend(q, k, v, scale=module.inv_norm_factor, alibi_slopes=_of_rank(slopes * module.beta, module._group))
    return residual + module.dense(out.flatten(2)), None


def _falcon(
    module: Any, attend: Attend, hidden_states: torch.Tensor, alibi: Any, *_: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = module._split_heads(module.query_key_value(hidden_states))  # [1, T, heads, H]
    if module.new_decoder_architecture:  # repeats each KV head for its queries
        each = q.shape[2] // module.num_kv_heads
        k, v = k[:, :, ::each], v[:, :, ::each]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    slopes = None
    if alibi is None:
        cos, sin = given["position_embeddings"]
        rotate: Any = sys.modules[module._modeling].apply_rotary_pos_emb
        q, k = rotate(q, k, cos, sin)
    elif module.config._attn_implementation != "sdpa":
        raise ValueError("transformers' eager Falcon adds ALiBi twice: load it with attn_implementation='sdpa'")
    else:  # scaled like the scores
        built = _built_slopes(module._modeling, module.num_heads * module._group.size, q.device)
        slopes = _of_rank(built * module.inv_norm_factor, module._group)
    out = attend(q, k, v, scale=module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(out.flatten(2)), None


def _mpt(
    module: Any, attend: Attend, hidden_states: torch.Tensor, position_bias: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    packed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        packed = packed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in packed.chunk(3, dim=2))
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]  # [N, 1, positions], 0 at the last one
    out = attend(q, k, v, scale=module.softmax_scale, alibi_slopes=_of_rank(slopes, module._group))
    return module.out_proj(out.flatten(2)), None


def _xglm(module: Any, attend: Attend, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    projected = (layer(hidden_states) for layer in (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in projected)
    return module.out_proj(attend(q, k, v, scale=module.scaling).flatten(2)), None


def _in_attn(module: Any, attend: Attend, *args: Any, **kwargs: Any) -> Any:
    """For modules that attend in a method ``_attn`` (GPT-J, CodeGen, GPT-Neo); the rest is the file's own forward."""
    scale = 1.0 / module.scale_attn if hasattr(module, "scale_attn") else 1.0
    window = module.config.window_size if getattr(module, "attention_type", "global") == "local" else None

    def attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        return attend(query, key, value, scale=scale, window=window).transpose(1, 2), None

    stock: Any = getattr(type(module._module), "_stock", type(module._module))
    return stock.forward(View(module._module, {**module._replaced, "_attn": attn}), *args, **kwargs)


FORWARDS: dict[str, Callable[..., Any]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
    "XGLMAttention": _xglm,
    "GPTJAttention": _in_attn,
    "CodeGenAttention": _in_attn,
    "GPTNeoSelfAttention": _in_attn,
}
