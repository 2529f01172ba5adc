"""The naive pipeline schedule, which torch lacks."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _sorted_batch_p2p, _wait_batch_p2p


class ScheduleNaive(PipelineScheduleSingle):
    """One micro-batch after another: each runs forward through all stages and back before the next one starts.

    It takes the least memory, but only one rank works at a time.
    """

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0])
        stage, last = self._stage, self._n_microbatches - 1
        for i in range(self._n_microbatches):
            _exchange(stage.get_fwd_recv_ops(i))
            output = stage.forward_one_chunk(i, arg_mbs[i], kwarg_mbs[i], save_forward_output=return_outputs)
            _exchange(stage.get_fwd_send_ops(i))
            self._maybe_compute_loss(stage, output, target_mbs, i)
            _exchange(stage.get_bwd_recv_ops(i))
            stage.backward_one_chunk(i, loss=self._maybe_get_loss(stage, i), last_backward=i == last)
            _exchange(stage.get_bwd_send_ops(i))
        self._update_losses(stage, losses)
        stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)


def _exchange(ops: list[Any]) -> None:
    for work in _sorted_batch_p2p(ops).values():
        _wait_batch_p2p(work)
