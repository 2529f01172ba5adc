"""What one GEMM launch is asked to do, and with what tile: values that configuration, cost and tables share."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.dtype_names import Dtype


@dataclass(frozen=True)
class Gemm:
    """C [M, N] = op(A) @ op(B) over K, as far as its configuration and its cost depend on it.

    ``layout`` is "nt" (forward: x @ W^T), "nn" (dgrad: dz @ W) or "tn" (wgrad: dz^T @ x). Several operand pairs are
    "grouped" (an output each; N, or M in wgrad, is their sum), "chained" (added up in one output; K is their sum) or
    "gated" (two products of [M, N] whose tiles meet in one epilogue). ``epilogue`` names its steps in order:

        scale          times the scales of fp8 operands
        bias           plus b
        act_grad       times act'(z), or the gradients of both factors of a gated layer
        gelu_tanh      or another activation's name: that activation
        preact         what the activation is applied to is stored beside the result
        residual       plus a matrix
        recompute_act  act(z), or act(g) * u, is stored beside its gradient
        row_sum        the row sums of op(A) are stored
        accumulate     the result is added to what C holds
    """

    layout: str
    M: int
    N: int
    K: int
    dtype: Dtype
    out_dtype: Dtype
    combine: str = "grouped"
    pairs: int = 1
    epilogue: tuple[str, ...] = ()
    reads: int = 0  # matrices [M, N] that the epilogue loads
    writes: int = 1  # matrices [M, N] that it stores
    precision: str = "ieee"  # of fp32 products: "ieee" or "tf32"
    aligned: bool = True  # both operands have the alignment that TMA asks for
    out_aligned: bool = True  # and so does what the epilogue reads and writes
    fp32_sums: bool = False  # fp8 products leave the tensor core's short accumulator every block of K
    row_invariant: bool = False  # a row's result may not depend on how many rows there are
    remote: str = ""  # "gather": A's rows arrive while the kernel runs; "send": C's go to other ranks

    @property
    def fp32(self) -> bool:
        """Whether the operands are fp32, the only ones of 4 bytes."""
        return self.dtype.itemsize == 4

    @property
    def tokens(self) -> int:
        """T, the dimension that changes from batch to batch."""
        return self.K if self.layout == "tn" else self.M


@dataclass(frozen=True)
class GemmConfig:
    """Tile and pipeline of one GEMM launch."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    use_tma: bool
    group_m: int = 8
    split_k: int = 1  # partial products over K, summed in a fixed order by a second launch
    epilogue_subtile: bool = False  # run the epilogue on half a tile at a time, in half the registers
    swap: bool = False  # multiply (op(B)^T, op(A)^T): features fill the tensor core's rows where tokens are few

    def __str__(self) -> str:
        marks = "".join(
            f"-{mark}"
            for mark, on in (("tma", self.use_tma), ("subtile", self.epilogue_subtile), ("swap", self.swap))
            if on
        )
        marks += f"-k{self.split_k}" if self.split_k > 1 else ""
        return f"{self.block_m}x{self.block_n}x{self.block_k}-w{self.num_warps}-s{self.num_stages}{marks}"
